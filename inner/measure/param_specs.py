"""Name and shape of a model's parameters, without building the model. No torch here."""

from collections.abc import Sequence
from math import prod

from inner.expert_names import expert_name, router_bias_name
from inner.model.block_params import block_params
from inner.model.sizes import ModelSizes
from inner.param_spec import ParamSpec


def param_specs(sizes: ModelSizes) -> tuple[ParamSpec, ...]:
    """Return full name and shape of every parameter, in the order of
    `Transformer.named_parameters()`.
    """
    outside = [ParamSpec(name, shape) for name, shape in sizes.outside_params.items()]
    num_before = next(number for number, spec in enumerate(outside) if spec.name == "norm.weight")
    specs = outside[:num_before]
    blocks = {
        has_experts: _block_specs(sizes, has_experts)
        for has_experts in (False, sizes.experts is not None)
    }
    of_depth = _block_specs(sizes, sizes.experts is not None, predicts=True)
    for layer in sizes.all_layers:
        block = of_depth if layer in sizes.predicting_layers else blocks[sizes.has_experts(layer)]
        specs += [ParamSpec(f"layers.{layer}.{name}", shape) for name, shape in block]
    return (*specs, *outside[num_before:])


def averaged_specs(sizes: ModelSizes) -> tuple[ParamSpec, ...]:
    """Return name and shape of all that islands average: the parameters, and the biases of routers,
    named as in `inner.model.buffers`.
    """
    if sizes.experts is None:
        return param_specs(sizes)
    shape = (sizes.experts.number,)
    biases = [
        ParamSpec(f"{router_bias_name(layer)}@buffer", shape) for layer in sizes.expert_layers
    ]
    return (*param_specs(sizes), *biases)


def _block_specs(
    sizes: ModelSizes, has_experts: bool, *, predicts: bool = False
) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of the parameters of a block. Each expert's matrix is a parameter."""
    specs: list[tuple[str, tuple[int, ...]]] = []
    for param in block_params(sizes, has_experts=has_experts, predicts=predicts):
        shape = param.shape(sizes)
        if param.is_stacked:
            specs += [
                (expert_name(param.name, number), shape)
                for number in range(param.num_copies(sizes))
            ]
        else:
            specs.append((param.name, shape))
    return specs


def num_active(sizes: ModelSizes) -> int:
    """Return the number of parameters that one token uses, with embedding and head, and without
    extra depths, which only training uses. It is the number of all other parameters, unless the
    model is a mixture of experts.
    """
    layers = (
        param.active_numel(sizes)
        for layer in range(sizes.num_layers)
        for param in block_params(sizes, has_experts=sizes.has_experts(layer))
    )
    return sum(map(prod, sizes.outside_params.values())) + sum(layers)


def num_elements(specs: Sequence[ParamSpec]) -> int:
    """Return the number of elements of all parameters among `specs`. Buffers are not counted."""
    return sum(prod(spec.shape) for spec in specs if "@" not in spec.name)
