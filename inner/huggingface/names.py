"""Hugging Face's names of the tensors of a Llama-family model. No torch here.

Values are not permuted: in both layouts a matrix is (outputs, inputs) and RoPE rotates the pairs (e, e + head_dim / 2).
"""

OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.q_proj.bias": "self_attn.q_proj.bias",
    "attention.k_proj.bias": "self_attn.k_proj.bias",
    "attention.v_proj.bias": "self_attn.v_proj.bias",
    "attention.out_proj.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate_proj.weight": "mlp.gate_proj.weight",
    "ffn.up_proj.weight": "mlp.up_proj.weight",
    "ffn.down_proj.weight": "mlp.down_proj.weight",
}


def huggingface_name(name: str) -> str:
    """Hugging Face's name of a parameter, given its full name here."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, number, name_in_layer = name.split(".", 2)
    return f"model.layers.{number}.{IN_LAYER[name_in_layer]}"
