"""Hugging Face's names of a model's tensors. No torch here.

The names of most tensors are in inner/model/block_params.py. This file adds those outside of the
blocks, the bias of a router, and the names that only some model types have.
"""

from dataclasses import dataclass, field
from typing import Literal

from inner.expert_names import ROUTER_BIAS, find_expert
from inner.model.block_params import BLOCK_PARAMS

OUTSIDE = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
IN_LAYER = {param.name: param.huggingface for param in BLOCK_PARAMS} | {
    ROUTER_BIAS: "mlp.gate.e_score_correction_bias"
}
"""Names within a layer. A name with {} is that of each expert, with the expert's number."""
QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


@dataclass(frozen=True)
class Fused:
    """Matrices that a folder holds as one."""

    name: str
    parts: tuple[str, ...]
    """The modules here, in the order of their rows."""
    order: Literal["one after the other", "by key head"] = "one after the other"
    """`by key head`: for each key-value head the rows of its query heads, then its own, then those
    of its values."""


@dataclass(frozen=True)
class Names:
    """How the names of a model type differ."""

    modules: dict[str, str] = field(default_factory=dict)
    """Names within a layer of modules that are not called as in IN_LAYER."""
    outside: dict[str, str] = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers."
    fused: tuple[Fused, ...] = ()
    has_columns_first: bool = False
    """Whether matrices of blocks are (inputs, outputs), as in GPT-2."""
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that hold nothing which was learned."""


GEMMA = Names(
    {"attention_out_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
)
OF_TYPE = {
    "mixtral": Names(
        {
            "ffn.router": "block_sparse_moe.gate",
            "ffn.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
            "ffn.experts.up_proj": "block_sparse_moe.experts.{}.w3",
            "ffn.experts.down_proj": "block_sparse_moe.experts.{}.w2",
        }
    ),
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi3": Names(
        fused=(
            Fused("self_attn.qkv_proj", QKV),
            Fused("mlp.gate_up_proj", ("ffn.gate_proj", "ffn.up_proj")),
        )
    ),
    "gpt_neox": Names(
        {
            "attention.out_proj": "attention.dense",
            "ffn.up_proj": "mlp.dense_h_to_4h",
            "ffn.down_proj": "mlp.dense_4h_to_h",
        },
        {"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        "gpt_neox.layers.",
        (Fused("attention.query_key_value", QKV, "by key head"),),
        ignored=(".attention.bias", ".attention.masked_bias"),
    ),
    "gpt2": Names(
        {
            "attention_norm": "ln_1",
            "attention.out_proj": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn.up_proj": "mlp.c_fc",
            "ffn.down_proj": "mlp.c_proj",
        },
        {
            "embed": "transformer.wte",
            "position": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        "transformer.h.",
        (Fused("attn.c_attn", QKV),),
        has_columns_first=True,
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "falcon": Names(
        {
            "attention.out_proj": "self_attention.dense",
            "ffn.up_proj": "mlp.dense_h_to_4h",
            "ffn.down_proj": "mlp.dense_4h_to_h",
        },
        {"embed": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head"},
        "transformer.h.",
        (Fused("self_attention.query_key_value", QKV, "by key head"),),
    ),
    "mpt": Names(
        {
            "attention_norm": "norm_1",
            "attention.out_proj": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn.up_proj": "ffn.up_proj",
            "ffn.down_proj": "ffn.down_proj",
        },
        {"embed": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head"},
        "transformer.blocks.",
        (Fused("attn.Wqkv", QKV),),
    ),
}
"""The names of model types that differ."""
FALCON_NORMS = {"attention_norm": "ln_attn", "ffn_norm": "ln_mlp"}
"""Names of the two norms of Falcon's parallel blocks."""


def names_of(model_type: str) -> Names:
    """Return how the names of a model type differ."""
    return OF_TYPE.get(model_type, Names())


def huggingface_name(name: str, model_type: str, modules: dict[str, str] | None = None) -> str:
    """Return a model type's name of a parameter or of a router's bias, given its full name here. Of
    fused matrices it is the name of the whole. `modules`: further names within a layer.
    """
    names = names_of(model_type)
    module, _, kind = name.rpartition(".")
    if module in names.outside:
        return f"{names.outside[module]}.{kind}"
    _, layer, in_layer = name.split(".", 2)
    expert = find_expert(in_layer)
    if expert is not None:
        in_layer = expert[0]
    number = "" if expert is None else expert[1]
    module, _, kind = in_layer.rpartition(".")
    whole = {part: fused.name for fused in names.fused for part in fused.parts}
    changed = (whole | names.modules | (modules or {})).get(module)
    theirs = IN_LAYER[in_layer] if changed is None else f"{changed}.{kind}"
    return f"{names.layers}{layer}.{theirs.format(number)}"
