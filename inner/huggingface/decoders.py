"""What a config.json says of what distinguishes a decoder from Llama (DecoderConfig). No torch
here.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from inner.config import Activation, DecoderConfig, WindowConfig
from inner.huggingface.rope_settings import read_window_theta
from inner.huggingface.type_table import FULL, MODEL_TYPES, SLIDING, ModelType

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
    """Return the windows of a supported config.json. Raises pydantic's ValidationError if the size
    is not allowed.
    """
    size = find_window(config)
    if size is None:
        return None
    model_type = MODEL_TYPES[config["model_type"]]
    pattern = _find_pattern(_sliding_layers(config, model_type))
    assert pattern is not None, "other patterns are refused"
    theta = read_window_theta(config, model_type)
    return WindowConfig(size=size, first_layer=pattern[0], full_every=pattern[1], rope_theta=theta)


def _find_pattern(slides: Sequence[bool]) -> tuple[int, int | None] | None:
    """Return the first layer with a window, and how often a layer has none behind it, of layers of
    which at least one has a window; None if there is no such pattern.
    """
    first = slides.index(True)
    for begin in (0, first):
        for every in (None, *range(2, len(slides) + 1)):
            window = WindowConfig(size=1, first_layer=begin, full_every=every)
            if [window.slides(layer) for layer in range(len(slides))] == list(slides):
                return begin, every
    return None


def read_decoder(config: dict[str, Any]) -> DecoderConfig | None:
    """Return what a supported config.json says of its decoder; None if it is as Llama. Raises
    pydantic's ValidationError if a value is not allowed.
    """
    model_type = MODEL_TYPES[config["model_type"]]
    values = dict(model_type.decoder)
    values |= {
        ours: config.get(theirs, default)
        for ours, (theirs, default) in model_type.decoder_keys.items()
    }
    if model_type.activation_key is not None:
        values["activation"] = ACTIVATIONS[name_activation(config, model_type)]
    for key, (names, default) in model_type.bias_keys.items():
        is_on = bool(config.get(key, default))
        values |= {name: is_on for name in names if name != "qkv_bias"}
    if model_type.scales_embeddings:
        values["embed_scale"] = math.sqrt(config["hidden_size"])
    values["window"] = read_window(config)
    values["rotary_dim"] = _read_rotary_dim(config, model_type)
    values["no_rope_every"] = _read_no_rope(config, model_type)
    values |= {"gpt2": _read_gpt2, "gpt_neox": _read_neox, "falcon": _read_falcon}.get(
        config["model_type"], _read_no
    )(config)
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


def name_activation(config: dict[str, Any], model_type: ModelType) -> str:
    """Return transformers' name of the activation in a config.json."""
    defaults = {"gpt2": "gelu_new", "gpt_neox": "gelu", "falcon": "gelu"}
    default = (
        "gelu_pytorch_tanh"
        if model_type.scales_embeddings
        else defaults.get(config["model_type"], "silu")
    )
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
    if (
        model_type.activation_key is not None
        and (name := name_activation(config, model_type)) not in ACTIVATIONS
    ):
        yield (
            f"{model_type.activation_key} is {name!r}; allowed: {', '.join(map(repr, ACTIVATIONS))}"
        )
    window = find_window(config)
    types = set(config.get("layer_types") or ())
    if window is not None and not (isinstance(window, int) and window > 0):
        yield f"sliding_window is {window!r}; allowed: a number of tokens, or null"
    elif window is not None and _find_pattern(_sliding_layers(config, model_type)) is None:
        yield (
            f"layer_types is {config['layer_types']!r}; allowed: a window in all layers from one "
            "on, but not in every n-th layer"
        )
    if unknown := types - {FULL, *([] if window is None else [SLIDING])}:
        yield f"layer_types has {', '.join(map(repr, sorted(unknown)))}; allowed: 'full_attention'"
    listed = config.get(NO_ROPE) if model_type.no_rope_every is not None else None
    every = None if listed is None else _read_no_rope(config, model_type)
    if listed is not None and every is not None and list(listed) != rope_layers(every, len(listed)):
        yield f"{NO_ROPE} is {listed!r}; allowed: a 0 for every n-th layer"
    yield from _find_unsupported_mpt(config)


def _find_unsupported_mpt(config: dict[str, Any]) -> Iterator[str]:
    if config["model_type"] != "mpt":
        return
    allowed = {
        "attn_type": "multihead_attention", "clip_qkv": None, "softmax_scale": None,
        "prefix_lm": False, "qk_ln": False,
        "attn_uses_sequence_id": False, "alibi": True, "alibi_bias_max": 8,
    }  # fmt: skip
    given = config.get("attn_config") or {}
    for key, value in allowed.items():
        if given.get(key, value) != value:
            yield f"attn_config.{key} is {given[key]!r}; allowed: {value!r}"
    num_heads = config.get("n_heads")
    if isinstance(num_heads, int) and num_heads & (num_heads - 1):
        yield (
            f"n_heads is {num_heads}; allowed: powers of two, because MPT has slopes of its own "
            "for other numbers"
        )


def rope_layers(every: int, num_layers: int) -> list[int]:
    """Return for each layer 1 if it has RoPE, and otherwise 0."""
    return [int((layer + 1) % every != 0) for layer in range(num_layers)]
