"""Hugging Face's names of the tensors of a Llama-family model. No torch here.

Values are not permuted: in both layouts a matrix is (outputs, inputs) and RoPE rotates the pairs (e, e + head_dim / 2).
"""

from inner.model.block_params import BLOCK_PARAMS

OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
IN_LAYER = {param.name: param.huggingface for param in BLOCK_PARAMS}


def huggingface_name(name: str) -> str:
    """Return Hugging Face's name of a parameter, given its full name here."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, number, name_in_layer = name.split(".", 2)
    return f"model.layers.{number}.{IN_LAYER[name_in_layer]}"
