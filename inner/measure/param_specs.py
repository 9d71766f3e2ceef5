"""Name and shape of a model's parameters, without building the model. No torch here."""

from collections.abc import Sequence
from math import prod

from inner.model.block_params import block_params
from inner.model.sizes import ModelSizes
from inner.param_spec import ParamSpec


def param_specs(sizes: ModelSizes) -> tuple[ParamSpec, ...]:
    """Return full name and shape of every parameter, in the order of
    `Transformer.named_parameters()`.
    """
    table = sizes.vocab_size, sizes.dim
    specs = [ParamSpec("embed.weight", table)]
    block = [(param.name, param.shape(sizes)) for param in block_params(sizes)]
    for layer in range(sizes.num_layers):
        specs += [ParamSpec(f"layers.{layer}.{name}", shape) for name, shape in block]
    specs.append(ParamSpec("norm.weight", (sizes.dim,)))
    return tuple(specs if sizes.tie_embeddings else [*specs, ParamSpec("head.weight", table)])


def num_elements(specs: Sequence[ParamSpec]) -> int:
    return sum(prod(spec.shape) for spec in specs)
