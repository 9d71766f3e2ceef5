"""A model's parameters by name and shape, without building it. No torch here."""

from collections.abc import Sequence
from math import prod

from inner.model.sizes import ModelSizes
from inner.param_spec import ParamSpec


def param_specs(sizes: ModelSizes) -> tuple[ParamSpec, ...]:
    """Full name and shape of every parameter, in the order of `Transformer.named_parameters()`."""
    table = sizes.vocab_size, sizes.dim
    specs = [ParamSpec("embed.weight", table)]
    for layer in range(sizes.num_layers):
        specs += [ParamSpec(f"layers.{layer}.{name}", shape) for name, shape in _block_shapes(sizes).items()]
    specs.append(ParamSpec("norm.weight", (sizes.dim,)))
    return tuple(specs if sizes.tie_embeddings else [*specs, ParamSpec("head.weight", table)])


def _block_shapes(sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"attention_norm.weight": (sizes.dim,)}
    for name, width in (("q", sizes.q_dim), ("k", sizes.kv_dim), ("v", sizes.kv_dim)):
        shapes[f"attention.{name}_proj.weight"] = (width, sizes.dim)
        if sizes.qkv_bias:
            shapes[f"attention.{name}_proj.bias"] = (width,)
    head_norms = ("attention.q_norm.weight", "attention.k_norm.weight") if sizes.qk_norm else ()
    return shapes | {
        "attention.out_proj.weight": (sizes.dim, sizes.q_dim),
        **dict.fromkeys(head_norms, (sizes.head_dim,)),
        "ffn_norm.weight": (sizes.dim,),
        "ffn.gate_proj.weight": (sizes.ffn_dim, sizes.dim),
        "ffn.up_proj.weight": (sizes.ffn_dim, sizes.dim),
        "ffn.down_proj.weight": (sizes.dim, sizes.ffn_dim),
    }


def num_elements(specs: Sequence[ParamSpec]) -> int:
    return sum(prod(spec.shape) for spec in specs)
