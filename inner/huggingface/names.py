"""Hugging Face's names of a model's tensors. No torch here.

The names of most tensors are in inner/model/block_params.py. This file adds those outside of the
blocks, the bias of a router, and the names that only one model type has.
"""

from inner.expert_names import ROUTER_BIAS, find_expert
from inner.model.block_params import BLOCK_PARAMS

OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
IN_LAYER = {param.name: param.huggingface for param in BLOCK_PARAMS} | {ROUTER_BIAS: "mlp.gate.e_score_correction_bias"}
"""Names within a layer. A name with {} is that of each expert, with the expert's number."""
OF_TYPE = {
    "mixtral": {
        "ffn.router.weight": "block_sparse_moe.gate.weight",
        "ffn.experts.gate_proj.weight": "block_sparse_moe.experts.{}.w1.weight",
        "ffn.experts.up_proj.weight": "block_sparse_moe.experts.{}.w3.weight",
        "ffn.experts.down_proj.weight": "block_sparse_moe.experts.{}.w2.weight",
    },
}
"""For each model type, the names that differ from IN_LAYER."""


def huggingface_name(name: str, model_type: str) -> str:
    """Return a model type's name of a parameter or of a router's bias, given its full name here."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, in_layer = name.split(".", 2)
    expert = find_expert(in_layer)
    if expert is not None:
        in_layer = expert[0]
    theirs = OF_TYPE.get(model_type, {}).get(in_layer, IN_LAYER[in_layer])
    number = "" if expert is None else expert[1]
    return f"model.layers.{layer}.{theirs.format(number)}"
