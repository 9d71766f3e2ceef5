"""How the decoder of a model is written into a config.json, and which model types compute it. No
torch here.
"""

import math
from collections.abc import Iterator
from typing import Any

from inner.config import DecoderConfig
from inner.huggingface.decoders import (
    ACTIVATIONS,
    NO_ROPE,
    NO_ROPE_EVERY,
    name_activation,
    rope_layers,
)
from inner.huggingface.type_table import FULL, MODEL_TYPES, SLIDING
from inner.model.sizes import ModelSizes


def build_decoder_keys(sizes: ModelSizes, name: str) -> dict[str, Any]:
    """Return the keys of a config.json that describe the decoder, for a type that computes it."""
    model_type = MODEL_TYPES[name]
    decoder = sizes.decoder
    keys = {theirs: getattr(decoder, ours) for ours, (theirs, _) in model_type.decoder_keys.items()}
    if "query_dim" in model_type.decoder_keys and decoder.query_dim is not None:
        # transformers takes integers only.
        keys["query_pre_attn_scalar"] = int(decoder.query_dim)
    if model_type.activation_key is not None:
        usual = name_activation({"model_type": name}, model_type)
        names = [usual, *ACTIVATIONS]
        keys[model_type.activation_key] = next(
            each for each in names if ACTIVATIONS[each] == decoder.activation
        )
    keys |= {key: _has_bias(sizes, names[-1]) for key, (names, _) in model_type.bias_keys.items()}
    if model_type.window_layers is not None:
        keys |= _build_window(sizes, name)
    if model_type.rotary_factor is not None:
        keys["partial_rotary_factor"] = keys[model_type.rotary_key] = _rotary_factor(sizes)
    if model_type.no_rope_every is not None:
        every = decoder.no_rope_every or sizes.num_layers + 1
        keys |= {NO_ROPE_EVERY: every, NO_ROPE: rope_layers(every, sizes.num_layers)}
    if name == "gpt_neox":
        keys["use_parallel_residual"] = decoder.parallel is not None
    if name == "falcon":
        keys |= _build_falcon(sizes)
    if name == "mpt":
        keys |= {"attn_config": {"alibi": True}, "no_bias": True, "expansion_ratio": 4}
    return keys


def _build_window(sizes: ModelSizes, name: str) -> dict[str, Any]:
    model_type = MODEL_TYPES[name]
    window = sizes.decoder.window
    keys: dict[str, Any] = {"sliding_window": None if window is None else window.size}
    if not model_type.slides_by_default:
        keys["use_sliding_window"] = window is not None
    if model_type.window_layers == "listed" and (
        window is not None or model_type.full_every is not None
    ):
        slides = [window is not None and window.slides(layer) for layer in range(sizes.num_layers)]
        keys["layer_types"] = [SLIDING if each else FULL for each in slides]
        # Without a window no layer slides, and transformers wants a number all the same.
        keys["sliding_window"] = 4096 if window is None else window.size
    return keys


def _build_falcon(sizes: ModelSizes) -> dict[str, Any]:
    is_new = sizes.decoder.parallel == "two_norms" or sizes.num_kv_heads not in (1, sizes.num_heads)
    return {
        "new_decoder_architecture": is_new,
        "multi_query": sizes.num_kv_heads == 1 and not is_new,
        "parallel_attn": sizes.decoder.parallel is not None,
        "num_ln_in_parallel_attn": 2 if sizes.decoder.parallel == "two_norms" else 1,
        "alibi": False,
    }


def _rotary_factor(sizes: ModelSizes) -> float:
    """Return the share of a head that turns, of which transformers takes the integer part."""
    rotary_dim = sizes.decoder.rotary_dim or sizes.head_dim
    factor = rotary_dim / sizes.head_dim
    return factor if int(sizes.head_dim * factor) == rotary_dim else math.nextafter(factor, 2.0)


def _has_bias(sizes: ModelSizes, name: str) -> bool:
    return sizes.qkv_bias if name == "qkv_bias" else getattr(sizes.decoder, name)


def find_decoder_obstacles(sizes: ModelSizes, name: str) -> Iterator[str]:
    """Yield the reasons for which a model type does not compute the decoder of a model."""
    model_type = MODEL_TYPES[name]
    decoder = sizes.decoder
    switched = {each for names, _ in model_type.bias_keys.values() for each in names}
    free = {*model_type.decoder_keys, *switched, *_free_fields(sizes, name)}
    for field, info in DecoderConfig.model_fields.items():
        value = getattr(decoder, field)
        allowed = model_type.decoder.get(field, info.default)
        if field not in free and value != allowed:
            yield f"model.decoder.{field} is {_text(value)}, and {name} has only {_text(allowed)}"
    scale = math.sqrt(sizes.dim) if model_type.scales_embeddings else None
    if decoder.embed_scale != scale:
        yield (
            f"model.decoder.embed_scale is {_text(decoder.embed_scale)}, and {name} has only "
            f"{_text(scale)}"
        )
    yield from _find_window_obstacles(sizes, name)
    yield from _find_size_obstacles(sizes, name)
    query_dim = decoder.query_dim
    if "query_dim" in free and (query_dim is None or query_dim != int(query_dim)):
        yield f"model.decoder.query_dim is {_text(query_dim)}, and {name} has only whole numbers"
    for names, _ in model_type.bias_keys.values():
        if len({_has_bias(sizes, each) for each in names}) > 1:
            yield f"only some of {', '.join(names)} are set, and {name} has all or none of them"
    if "qkv_bias" not in switched and sizes.qkv_bias != model_type.qkv_bias:
        yield (
            f"model.qkv_bias is {_text(sizes.qkv_bias)}, and {name} has only "
            f"{_text(model_type.qkv_bias)}"
        )
    if sizes.qk_norm != model_type.qk_norm:
        yield (
            f"model.qk_norm is {_text(sizes.qk_norm)}, and {name} has only "
            f"{_text(model_type.qk_norm)}"
        )


def _free_fields(sizes: ModelSizes, name: str) -> set[str]:
    """Return the fields of DecoderConfig for which a type has a key that does not hold their value
    itself.
    """
    model_type = MODEL_TYPES[name]
    is_there = {
        "embed_scale": True,
        "activation": model_type.activation_key is not None and sizes.experts is None,
        "window": model_type.window_layers is not None,
        "rotary_dim": model_type.rotary_factor is not None,
        "no_rope_every": model_type.no_rope_every is not None,
        "max_positions": name == "gpt2",
        "parallel": (name == "gpt_neox" and sizes.decoder.parallel != "one_norm")
        or name == "falcon",
    }
    return {field for field, is_free in is_there.items() if is_free}


def _find_window_obstacles(sizes: ModelSizes, name: str) -> Iterator[str]:
    model_type = MODEL_TYPES[name]
    window = sizes.decoder.window
    if window is None or model_type.window_layers is None:
        return
    if model_type.window_layers == "all" and (window.first_layer or window.full_every):
        yield f"model.decoder.window is in some layers only, and in {name} it is in all"
    if window.rope_theta is not None and not model_type.has_rope_by_layer_type:
        yield (
            f"model.decoder.window.rope_theta is {_text(window.rope_theta)}, which {name} does "
            "not have"
        )
    if (
        model_type.has_rope_by_layer_type
        and window.rope_theta is None
        and sizes.rope_scaling is not None
    ):
        yield f"model.rope_scaling is set, and in {name} it is not for layers with a window"


def _find_size_obstacles(sizes: ModelSizes, name: str) -> Iterator[str]:
    model_type = MODEL_TYPES[name]
    if sizes.own_head_dim is not None and not model_type.has_head_dim:
        yield f"model.head_dim is {sizes.own_head_dim}, and {name} has only dim / num_heads"
    if sizes.dim % sizes.num_heads and model_type.needs_whole_heads:
        yield (
            f"model.dim is {sizes.dim}, and {name} has only multiples of num_heads "
            f"({sizes.num_heads})"
        )
    if "num_kv_heads" not in model_type.size_keys and sizes.num_kv_heads != sizes.num_heads:
        yield (
            f"model.num_kv_heads is {sizes.num_kv_heads}, and {name} has only as many as num_heads"
        )
    if "ffn_dim" not in model_type.size_keys and sizes.ffn_dim != 4 * sizes.dim:
        yield f"model.ffn_dim is {sizes.ffn_dim}, and {name} has only 4 x dim"
    if sizes.decoder.positions != "rope" and sizes.rope_scaling is not None:
        yield f"model.rope_scaling is set, and {name} has no RoPE"
    if name == "phi3" and sizes.rope_scaling is not None:
        yield (
            "model.rope_scaling is set, and phi3 has only a scaling (longrope) that this model "
            "does not have"
        )
    if (
        name == "falcon"
        and sizes.decoder.parallel is None
        and sizes.num_kv_heads not in (1, sizes.num_heads)
    ):
        yield (
            f"model.num_kv_heads is {sizes.num_kv_heads}, and falcon without decoder.parallel "
            "has only 1 or num_heads"
        )
    if name == "mpt" and sizes.num_heads & (sizes.num_heads - 1):
        yield (
            f"model.num_heads is {sizes.num_heads}, and mpt has these slopes only for powers of two"
        )


def _text(value: object) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    )
