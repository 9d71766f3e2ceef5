"""How a config.json describes what distinguishes a decoder from Llama (DecoderConfig). No torch here."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from inner.config import Activation, DecoderConfig, WindowConfig
from inner.huggingface.rope_settings import read_window_theta
from inner.huggingface.type_table import FULL, MODEL_TYPES, SLIDING, ModelType
from inner.model.sizes import ModelSizes

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
"""transformers' names of the activations. The first name of an activation is written."""
WINDOW_LAYERS = 28
"""The first layer with a sliding window in Qwen2 and Qwen3 if the config.json does not set it."""
NO_ROPE = "no_rope_layers"
NO_ROPE_EVERY = "no_rope_layer_interval"
FIRST_WINDOW = "max_window_layers"


def find_window(config: dict[str, Any]) -> int | None:
    """Return the sliding window of a supported type, in tokens; None if attention sees the whole
    sequence in all layers.
    """
    model_type = MODEL_TYPES[config["model_type"]]
    if model_type.window_layers is None:
        return None
    window = config.get("sliding_window", model_type.sliding_window)
    if window is None or not config.get("use_sliding_window", model_type.slides_by_default):
        return None
    return window if any(_sliding_layers(config, model_type)) else None


def _sliding_layers(config: dict[str, Any], model_type: ModelType) -> list[bool]:
    """Return for each layer whether it has a window, if any has one."""
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return [True]
    if model_type.window_layers == "all":
        return [True] * num_layers
    if layer_types := config.get("layer_types"):
        return [kind == SLIDING for kind in layer_types]
    every = config.get("sliding_window_pattern", model_type.full_every)
    if every is not None:
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    first = config.get(FIRST_WINDOW, WINDOW_LAYERS)
    return [layer >= first for layer in range(num_layers)]


def read_window(config: dict[str, Any]) -> WindowConfig | None:
    """Return the windows of a supported config.json. Raises pydantic's ValidationError if the size is not allowed."""
    size = find_window(config)
    if size is None:
        return None
    model_type = MODEL_TYPES[config["model_type"]]
    pattern = _find_pattern(_sliding_layers(config, model_type))
    assert pattern is not None, "other patterns are refused"
    theta = read_window_theta(config, model_type)
    return WindowConfig(size=size, first_layer=pattern[0], full_every=pattern[1], rope_theta=theta)


def _find_pattern(slides: Sequence[bool]) -> tuple[int, int | None] | None:
    """Return the first layer with a window, and how often a layer has none behind it, of layers of which at least one has a
    window; None if there is no such pattern.
    """
    first = slides.index(True)
    for begin in (0, first):
        for every in (None, *range(2, len(slides) + 1)):
            window = WindowConfig(size=1, first_layer=begin, full_every=every)
            if [window.slides(layer) for layer in range(len(slides))] == list(slides):
                return begin, every
    return None


def read_decoder(config: dict[str, Any]) -> DecoderConfig | None:
    """Return what a supported config.json says of its decoder; None if it is as Llama. Raises pydantic's ValidationError if a
    value is not allowed.
    """
    model_type = MODEL_TYPES[config["model_type"]]
    values = dict(model_type.decoder)
    values |= {ours: config.get(theirs, default) for ours, (theirs, default) in model_type.decoder_keys.items()}
    if model_type.activation_key is not None:
        values["activation"] = ACTIVATIONS[_activation(config, model_type)]
    for key, (names, default) in model_type.bias_keys.items():
        is_on = bool(config.get(key, default))
        values |= {name: is_on for name in names if name != "qkv_bias"}
    if model_type.scales_embeddings:
        values["embed_scale"] = math.sqrt(config["hidden_size"])
    values["window"] = read_window(config)
    values["rotary_dim"] = _read_rotary_dim(config, model_type)
    values["no_rope_every"] = _read_no_rope(config, model_type)
    values |= {"gpt2": _read_gpt2, "gpt_neox": _read_neox, "falcon": _read_falcon}.get(config["model_type"], _read_no)(
        config
    )
    decoder = DecoderConfig.model_validate(values)
    return decoder if decoder.changes else None


def _read_no(_: dict[str, Any]) -> dict[str, Any]:
    return {}


def _read_gpt2(config: dict[str, Any]) -> dict[str, Any]:
    return {"max_positions": config.get("n_positions", 1024)}


def _read_neox(config: dict[str, Any]) -> dict[str, Any]:
    return {"parallel": "two_norms" if config.get("use_parallel_residual", True) else None}


def _read_falcon(config: dict[str, Any]) -> dict[str, Any]:
    if not (is_new_falcon(config) or config.get("parallel_attn", True)):
        return {"parallel": None}
    num_norms = config.get("num_ln_in_parallel_attn") or (2 if is_new_falcon(config) else 1)
    return {"parallel": "two_norms" if num_norms == 2 and is_new_falcon(config) else "one_norm"}


def is_new_falcon(config: dict[str, Any]) -> bool:
    """Return whether a config.json of a Falcon is that of the 40B's architecture."""
    return bool(config.get("new_decoder_architecture", False))


def _activation(config: dict[str, Any], model_type: ModelType) -> str:
    defaults = {"gpt2": "gelu_new", "gpt_neox": "gelu", "falcon": "gelu"}
    default = "gelu_pytorch_tanh" if model_type.scales_embeddings else defaults.get(config["model_type"], "silu")
    return config.get(model_type.activation_key or "") or default


def _read_rotary_dim(config: dict[str, Any], model_type: ModelType) -> int | None:
    """Return the size of the part of a head that turns, or None if the whole head turns."""
    if model_type.rotary_factor is None:
        return None
    rope = config.get("rope_parameters") or {}
    keys = (model_type.rotary_key, "partial_rotary_factor")
    given = [rope.get("partial_rotary_factor"), *(config.get(key) for key in keys)]
    factor = next((value for value in given if value is not None), model_type.rotary_factor)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * factor) if int(head_dim * factor) != head_dim else None


def _read_no_rope(config: dict[str, Any], model_type: ModelType) -> int | None:
    if model_type.no_rope_every is None:
        return None
    listed = config.get(NO_ROPE)
    if listed is None:
        return config.get(NO_ROPE_EVERY, model_type.no_rope_every)
    if all(listed):
        return None
    return listed.index(0) + 1


def find_unsupported_decoder(config: dict[str, Any]) -> Iterator[str]:
    """Yield messages about settings of the decoder that this model does not support."""
    model_type = MODEL_TYPES[config["model_type"]]
    if model_type.activation_key is not None and (name := _activation(config, model_type)) not in ACTIVATIONS:
        yield f"{model_type.activation_key} is {name!r}; allowed: {', '.join(map(repr, ACTIVATIONS))}"
    window = find_window(config)
    types = set(config.get("layer_types") or ())
    if window is not None and not (isinstance(window, int) and window > 0):
        yield f"sliding_window is {window!r}; allowed: a number of tokens, or null"
    elif window is not None and _find_pattern(_sliding_layers(config, model_type)) is None:
        yield (
            f"layer_types is {config['layer_types']!r}; allowed: a window in all layers from one on, but not in every "
            "n-th layer"
        )
    if unknown := types - {FULL, *([] if window is None else [SLIDING])}:
        yield f"layer_types has {', '.join(map(repr, sorted(unknown)))}; allowed: 'full_attention'"
    listed = config.get(NO_ROPE) if model_type.no_rope_every is not None else None
    every = None if listed is None else _read_no_rope(config, model_type)
    if listed is not None and every is not None and list(listed) != _rope_layers(every, len(listed)):
        yield f"{NO_ROPE} is {listed!r}; allowed: a 0 for every n-th layer"
    yield from _find_unsupported_mpt(config)


def _find_unsupported_mpt(config: dict[str, Any]) -> Iterator[str]:
    if config["model_type"] != "mpt":
        return
    allowed = {
        "attn_type": "multihead_attention", "clip_qkv": None, "softmax_scale": None, "prefix_lm": False, "qk_ln": False,
        "attn_uses_sequence_id": False, "alibi": True, "alibi_bias_max": 8,
    }  # fmt: skip
    given = config.get("attn_config") or {}
    for key, value in allowed.items():
        if given.get(key, value) != value:
            yield f"attn_config.{key} is {given[key]!r}; allowed: {value!r}"
    num_heads = config.get("n_heads")
    if isinstance(num_heads, int) and num_heads & (num_heads - 1):
        yield f"n_heads is {num_heads}; allowed: powers of two, because MPT has slopes of its own for other numbers"


def _rope_layers(every: int, num_layers: int) -> list[int]:
    return [int((layer + 1) % every != 0) for layer in range(num_layers)]


def build_decoder_keys(sizes: ModelSizes, name: str) -> dict[str, Any]:
    """Return the keys of a config.json that describe the decoder, for a type that computes it."""
    model_type = MODEL_TYPES[name]
    decoder = sizes.decoder
    keys = {theirs: getattr(decoder, ours) for ours, (theirs, _) in model_type.decoder_keys.items()}
    if "query_dim" in model_type.decoder_keys and decoder.query_dim is not None:
        # transformers takes integers only.
        keys["query_pre_attn_scalar"] = int(decoder.query_dim)
    if model_type.activation_key is not None:
        usual = _activation({"model_type": name}, model_type)
        names = [usual, *ACTIVATIONS]
        keys[model_type.activation_key] = next(each for each in names if ACTIVATIONS[each] == decoder.activation)
    keys |= {key: _has_bias(sizes, names[-1]) for key, (names, _) in model_type.bias_keys.items()}
    if model_type.window_layers is not None:
        keys |= _build_window(sizes, name)
    if model_type.rotary_factor is not None:
        keys["partial_rotary_factor"] = keys[model_type.rotary_key] = _rotary_factor(sizes)
    if model_type.no_rope_every is not None:
        every = decoder.no_rope_every or sizes.num_layers + 1
        keys |= {NO_ROPE_EVERY: every, NO_ROPE: _rope_layers(every, sizes.num_layers)}
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
    if model_type.window_layers == "listed" and (window is not None or model_type.full_every is not None):
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
        yield f"model.decoder.embed_scale is {_text(decoder.embed_scale)}, and {name} has only {_text(scale)}"
    yield from _find_window_obstacles(sizes, name)
    yield from _find_size_obstacles(sizes, name)
    query_dim = decoder.query_dim
    if "query_dim" in free and (query_dim is None or query_dim != int(query_dim)):
        yield f"model.decoder.query_dim is {_text(query_dim)}, and {name} has only whole numbers"
    for names, _ in model_type.bias_keys.values():
        if len({_has_bias(sizes, each) for each in names}) > 1:
            yield f"only some of {', '.join(names)} are set, and {name} has all or none of them"
    if "qkv_bias" not in switched and sizes.qkv_bias != model_type.qkv_bias:
        yield f"model.qkv_bias is {_text(sizes.qkv_bias)}, and {name} has only {_text(model_type.qkv_bias)}"
    if sizes.qk_norm != model_type.qk_norm:
        yield f"model.qk_norm is {_text(sizes.qk_norm)}, and {name} has only {_text(model_type.qk_norm)}"


def _free_fields(sizes: ModelSizes, name: str) -> set[str]:
    """Return the fields of DecoderConfig for which a type has a key that does not hold their value itself."""
    model_type = MODEL_TYPES[name]
    is_there = {
        "embed_scale": True,
        "activation": model_type.activation_key is not None and sizes.experts is None,
        "window": model_type.window_layers is not None,
        "rotary_dim": model_type.rotary_factor is not None,
        "no_rope_every": model_type.no_rope_every is not None,
        "max_positions": name == "gpt2",
        "parallel": (name == "gpt_neox" and sizes.decoder.parallel != "one_norm") or name == "falcon",
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
        yield f"model.decoder.window.rope_theta is {_text(window.rope_theta)}, which {name} does not have"
    if model_type.has_rope_by_layer_type and window.rope_theta is None and sizes.rope_scaling is not None:
        yield f"model.rope_scaling is set, and in {name} it is not for layers with a window"


def _find_size_obstacles(sizes: ModelSizes, name: str) -> Iterator[str]:
    model_type = MODEL_TYPES[name]
    if sizes.own_head_dim is not None and not model_type.has_head_dim:
        yield f"model.head_dim is {sizes.own_head_dim}, and {name} has only dim / num_heads"
    if sizes.dim % sizes.num_heads and model_type.needs_whole_heads:
        yield f"model.dim is {sizes.dim}, and {name} has only multiples of num_heads ({sizes.num_heads})"
    if "num_kv_heads" not in model_type.size_keys and sizes.num_kv_heads != sizes.num_heads:
        yield f"model.num_kv_heads is {sizes.num_kv_heads}, and {name} has only as many as num_heads"
    if "ffn_dim" not in model_type.size_keys and sizes.ffn_dim != 4 * sizes.dim:
        yield f"model.ffn_dim is {sizes.ffn_dim}, and {name} has only 4 x dim"
    if sizes.decoder.positions != "rope" and sizes.rope_scaling is not None:
        yield f"model.rope_scaling is set, and {name} has no RoPE"
    if name == "phi3" and sizes.rope_scaling is not None:
        yield "model.rope_scaling is set, and phi3 has only a scaling (longrope) that this model does not have"
    if name == "falcon" and sizes.decoder.parallel is None and sizes.num_kv_heads not in (1, sizes.num_heads):
        yield f"model.num_kv_heads is {sizes.num_kv_heads}, and falcon without decoder.parallel has only 1 or num_heads"
    if name == "mpt" and sizes.num_heads & (sizes.num_heads - 1):
        yield f"model.num_heads is {sizes.num_heads}, and mpt has these slopes only for powers of two"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
