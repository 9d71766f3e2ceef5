"""Checks that the sizes of a model fit each other. No torch here."""

from typing import TYPE_CHECKING

from inner.config import DecoderConfig
from inner.errors import InputError, nearest_multiples

if TYPE_CHECKING:
    from inner.model.sizes import ModelSizes


def check_sizes(sizes: "ModelSizes") -> None:
    """Raise InputError if the sizes do not fit each other."""
    _check_heads(sizes)
    _check_experts(sizes)
    _check_latent(sizes)
    _check_decoder(sizes)


def _check_heads(sizes: "ModelSizes") -> None:
    """Raise InputError unless head sizes are even (RoPE rotates pairs) and query heads share
    key-value heads evenly.
    """
    if sizes.own_head_dim is not None and sizes.own_head_dim % 2:
        raise InputError(
            f"model.head_dim ({sizes.own_head_dim}) must be even; try "
            f"{nearest_multiples(sizes.own_head_dim, 2)}"
        )
    if sizes.latent is None and sizes.own_head_dim is None and sizes.dim % (2 * sizes.num_heads):
        raise InputError(
            f"model.dim ({sizes.dim}) must be a multiple of 2 x num_heads ({sizes.num_heads}); "
            f"try model.dim {nearest_multiples(sizes.dim, 2 * sizes.num_heads)}, or set "
            "model.head_dim"
        )
    if sizes.num_heads % sizes.num_kv_heads:
        divisors = [n for n in range(1, sizes.num_heads + 1) if sizes.num_heads % n == 0]
        raise InputError(
            f"model.num_heads ({sizes.num_heads}) must be a multiple of num_kv_heads "
            f"({sizes.num_kv_heads}); try num_kv_heads {', '.join(map(str, divisors))}"
        )
    if sizes.qk_norm and sizes.qkv_bias:
        raise InputError(
            "model.qk_norm and model.qkv_bias are both set, but no model type of transformers has "
            "both, so the weights could not be exported; set one to false"
        )
    if sizes.qkv_bias and sizes.experts is not None:
        raise InputError(
            "model.qkv_bias is true with model.experts, but none of the model types of "
            "transformers that can be "
            "exported has both; set qkv_bias to false"
        )


def _check_experts(sizes: "ModelSizes") -> None:
    """Raise InputError unless the experts' matrices can be multiplied in groups, and some block has
    experts.
    """
    if sizes.experts is None:
        return
    if sizes.dim % 8:
        raise InputError(
            f"model.dim ({sizes.dim}) must be a multiple of 8 with model.experts, because grouped "
            f"matrix products need rows of whole 16 bytes; try {nearest_multiples(sizes.dim, 8)}"
        )
    if sizes.experts.dense_layers >= sizes.num_layers:
        raise InputError(
            f"model.experts.dense_layers ({sizes.experts.dense_layers}) leaves none of "
            "model.num_layers "
            f"({sizes.num_layers}) with experts; lower it, or leave model.experts out"
        )


def _check_latent(sizes: "ModelSizes") -> None:
    """Raise InputError if another setting of attention is given beside latent attention."""
    if sizes.latent is None:
        return
    if sizes.num_kv_heads != sizes.num_heads:
        raise InputError(
            f"model.num_kv_heads ({sizes.num_kv_heads}) must equal num_heads ({sizes.num_heads}) "
            "with model.latent, "
            f"whose heads do not share keys; set num_kv_heads to {sizes.num_heads}"
        )
    beside = {
        "head_dim": sizes.own_head_dim is not None,
        "qk_norm": sizes.qk_norm,
        "qkv_bias": sizes.qkv_bias,
    }
    if given := [f"model.{name}" for name, is_given in beside.items() if is_given]:
        raise InputError(
            f"{' and '.join(given)} cannot be set with model.latent, which has its own sizes; "
            "leave it out"
        )


OF_ATTENTION = (
    "out_bias", "positions", "rotary_dim", "no_rope_every", "window", "query_dim", "score_cap"
)  # fmt: skip
"""Keys of model.decoder that belong to ordinary attention."""
OF_FEED_FORWARD = ("activation", "gated", "ffn_bias")


def _check_decoder(sizes: "ModelSizes") -> None:
    """Raise InputError if a setting of the decoder does not fit another part of the model."""
    decoder = sizes.decoder
    if sizes.latent is not None:
        _refuse(decoder, OF_ATTENTION, "model.latent, which has an attention of its own")
    if sizes.experts is not None:
        _refuse(decoder, OF_FEED_FORWARD, "model.experts, whose experts are SwiGLU without biases")
    if sizes.predict is not None:
        _refuse(
            decoder,
            tuple(DecoderConfig.model_fields),
            "model.predict, which is for decoders like DeepSeek-V3's",
        )
    if decoder.rotary_dim is not None and decoder.rotary_dim > sizes.head_dim:
        raise InputError(
            f"model.decoder.rotary_dim ({decoder.rotary_dim}) is more than the size of a head "
            f"({sizes.head_dim}); lower it, or leave it out to turn whole heads"
        )


def _refuse(decoder: DecoderConfig, names: tuple[str, ...], beside: str) -> None:
    """Raise InputError if one of these keys is set, which cannot stand beside another part of the
    model.
    """
    if given := [f"model.decoder.{name}" for name in decoder.changes if name in names]:
        raise InputError(f"{' and '.join(given)} cannot be set with {beside}; leave it out")
