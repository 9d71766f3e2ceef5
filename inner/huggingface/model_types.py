"""The model type with which transformers computes a model, and features of a config.json that are
refused. No torch here.
"""

from collections.abc import Iterator
from typing import Any

from inner.errors import InputError
from inner.huggingface.decoder_export import build_decoder_keys, find_decoder_obstacles
from inner.huggingface.decoders import find_unsupported_decoder
from inner.huggingface.mixtures import (
    DEEPSEEK,
    build_mixture_keys,
    find_obstacles,
    find_unsupported_mixture,
    has_biases,
    has_latent,
)
from inner.huggingface.rope_settings import find_unsupported_rope
from inner.huggingface.type_table import FIXED, MODEL_TYPES
from inner.model.sizes import ModelSizes

ATTEMPTS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "gpt_neox",
    "gpt2",
    "cohere",
    "falcon",
    "mpt",
)
"""Dense types, in the order in which they are tried for an export."""
WITHOUT_PAD = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "olmoe", "mixtral", DEEPSEEK)
"""Types without a padding token if the config.json names none. Others take one that may not be in
the vocabulary."""
OPTIONAL = {"gpt2": ("ffn_dim",), "falcon": ("ffn_dim",)}
"""Sizes that a config.json may leave out: the feed-forward is then four times as wide as the
stream."""


def choose_model_type(sizes: ModelSizes) -> str:
    """Return the model type with which transformers computes this model. Raises InputError if there
    is none.
    """
    model_type = _nearest_type(sizes)
    if obstacles := find_export_obstacles(sizes, 0.0):
        listed = "\n".join(f"  {line}" for line in obstacles)
        raise InputError(
            "this model cannot be exported, because transformers has no model type for it among "
            "those that are "
            f"supported here; the nearest is {model_type}:\n{listed}"
        )
    return model_type


def find_export_obstacles(sizes: ModelSizes, bias_speed: float) -> list[str]:
    """Return the reasons for which a model cannot be exported after it was trained with
    optimizer.balance.bias_speed; empty if it can.
    """
    model_type = _nearest_type(sizes)
    obstacles = [*find_decoder_obstacles(sizes, model_type), *find_obstacles(sizes, model_type)]
    if sizes.experts is not None and bias_speed and not has_biases(model_type):
        obstacles.append(
            f"optimizer.balance.bias_speed is {bias_speed:g}, and routers of {model_type} have no "
            "biases; 0 keeps them away"
        )
    return obstacles


def _nearest_type(sizes: ModelSizes) -> str:
    """Return the model type that has the attention of this model, and experts if it has any."""
    if sizes.latent is not None:
        return DEEPSEEK
    if sizes.experts is not None:
        return {True: "qwen3_moe", "whole": "olmoe", False: "mixtral"}[sizes.qk_norm]
    obstacles = {name: len(list(find_decoder_obstacles(sizes, name))) for name in ATTEMPTS}
    if sizes.model_type is not None and not obstacles.get(sizes.model_type, 1):
        return sizes.model_type
    return min(obstacles, key=lambda name: obstacles[name])


def build_type_keys(sizes: ModelSizes) -> dict[str, Any]:
    """Return the keys of a config.json that name the type, describe experts, and switch off
    features that this model does not have. Raises InputError if no type computes this model.
    """
    model_type = choose_model_type(sizes)
    keys: dict[str, Any] = {
        "architectures": [MODEL_TYPES[model_type].architecture],
        "model_type": model_type,
    }
    keys |= build_mixture_keys(sizes, model_type)
    if sizes.experts is None and sizes.latent is None:
        keys |= {key: values[-1] for key, values in MODEL_TYPES[model_type].fixed.items()}
    if model_type not in WITHOUT_PAD:
        keys["pad_token_id"] = None
    if model_type in (
        "qwen3",
        "qwen3_moe",
        "olmoe",
        DEEPSEEK,
        "olmo2",
        "olmo3",
        "gemma",
        "gemma2",
        "gemma3_text",
    ):
        keys["attention_bias"] = False
    return keys | build_decoder_keys(sizes, model_type)


def find_unsupported(config: dict[str, Any]) -> Iterator[str]:
    """Yield messages about features of a config.json that this model does not support."""
    name = config.get("model_type")
    if name not in MODEL_TYPES:
        yield f"model_type is {name!r}; allowed: {', '.join(MODEL_TYPES)}"
        return
    model_type = MODEL_TYPES[name]
    optional = {"num_kv_heads", *OPTIONAL.get(name, ())}
    required = [key for ours, key in model_type.size_keys.items() if ours not in optional]
    yield from (f"{key} is missing" for key in required if config.get(key) is None)
    key = model_type.size_keys.get("num_kv_heads")
    if key is not None and key not in config and not model_type.num_kv_heads_is_optional:
        yield f"{key} is missing"
    free = {
        *model_type.bias_keys,
        *([] if model_type.rotary_factor is None else ["partial_rotary_factor"]),
    }
    general = {key: allowed for key, allowed in FIXED.items() if key not in free}
    for key, allowed in {**general, **model_type.fixed}.items():
        if config.get(key) not in (None, *allowed):
            yield f"{key} is {config[key]!r}; allowed: {', '.join(map(repr, allowed))}"
    yield from find_unsupported_decoder(config)
    yield from find_unsupported_rope(config)
    yield from find_unsupported_mixture(config)


def read_head_dim(config: dict[str, Any]) -> int | None:
    """Return the size of a head from the config or the type's default; None if it is dim /
    num_heads, and for latent attention, which has sizes of its own.
    """
    if has_latent(config["model_type"]):
        return None
    head_dim = config.get("head_dim") or MODEL_TYPES[config["model_type"]].head_dim
    keys = MODEL_TYPES[config["model_type"]].size_keys
    dim = config[keys["dim"]]
    num_heads = config[keys["num_heads"]]
    if head_dim is None or not isinstance(dim, int) or not isinstance(num_heads, int):
        return None
    return head_dim if head_dim * num_heads != dim else None
