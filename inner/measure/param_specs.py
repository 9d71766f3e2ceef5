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
        specs += [ParamSpec(f"layers.{layer}.{name}.weight", shape) for name, shape in _block_shapes(sizes).items()]
    specs.append(ParamSpec("norm.weight", (sizes.dim,)))
    return tuple(specs if sizes.tie_embeddings else [*specs, ParamSpec("head.weight", table)])


def _block_shapes(sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    kv_dim = sizes.num_kv_heads * sizes.head_dim
    head_norms = ("attention.q_norm", "attention.k_norm") if sizes.qk_norm else ()
    return {
        "attention_norm": (sizes.dim,),
        "attention.q_proj": (sizes.dim, sizes.dim),
        "attention.k_proj": (kv_dim, sizes.dim),
        "attention.v_proj": (kv_dim, sizes.dim),
        "attention.out_proj": (sizes.dim, sizes.dim),
        **dict.fromkeys(head_norms, (sizes.head_dim,)),
        "ffn_norm": (sizes.dim,),
        "ffn.gate_proj": (sizes.ffn_dim, sizes.dim),
        "ffn.up_proj": (sizes.ffn_dim, sizes.dim),
        "ffn.down_proj": (sizes.dim, sizes.ffn_dim),
    }


def num_elements(specs: Sequence[ParamSpec]) -> int:
    return sum(prod(spec.shape) for spec in specs)
