"""Converts between model sizes and a Hugging Face config.json. No torch here.

A config.json that asks for a feature this model does not have is refused; nothing is silently ignored.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from inner.config import ModelConfig
from inner.errors import InputError
from inner.model.sizes import ModelSizes

CONFIG = "config.json"
SIZES = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Defaults of both architectures for keys that a config.json leaves out.
DEFAULT_THETA, DEFAULT_EPS = 10000.0, 1e-6
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys for which this model supports only one value."""


def build_config_json(sizes: ModelSizes, seq_len: int, dtype: str, bos_id: int | None, eos_id: int) -> dict[str, Any]:
    """Build the config.json of a model trained on sequences of `seq_len`, with weights stored as `dtype`."""
    model_type = "qwen3" if sizes.qk_norm else "llama"
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        **{theirs: getattr(sizes, ours) for ours, theirs in SIZES.items()},
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": sizes.tie_embeddings,
        "max_position_embeddings": seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
        **({"use_sliding_window": False, "sliding_window": None} if sizes.qk_norm else {"mlp_bias": False}),
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json. Raises InputError if it is missing or damaged."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}; give a folder with config.json and *.safetensors, as "
            "written by `diloco export` or found in a model on the hub"
        ) from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); write or copy it again") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: got a JSON {type(values).__name__}, need an object")
    return values


def read_model_config(folder: Path) -> ModelConfig:
    """Read the model config of a folder, with every size set. Raises InputError that lists all unsupported features."""
    config = read_config(folder)
    unsupported = list(find_unsupported(config))
    if unsupported:
        listed = "\n".join(f"  {line}" for line in unsupported)
        raise InputError(f"{folder / CONFIG}: this model is not supported:\n{listed}")
    values = {ours: config.get(theirs) for ours, theirs in SIZES.items()}
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = values["num_heads"]
    try:
        return ModelConfig(
            **values,
            rope_theta=_rope_settings(config).get("rope_theta", config.get("rope_theta", DEFAULT_THETA)),
            norm_eps=config.get("rms_norm_eps", DEFAULT_EPS),
            qk_norm=config["model_type"] == "qwen3",
            tie_embeddings=config.get("tie_word_embeddings", False),
        )
    except ValidationError as error:
        problem = error.errors()[0]
        ours = str(problem["loc"][0])
        raise InputError(
            f"{folder / CONFIG}: {SIZES.get(ours, ours)}: got {problem['input']!r}; allowed: {problem['msg']}"
        ) from None


def fill_sizes_from_folder(given: ModelConfig, folder: Path) -> ModelConfig:
    """Copy `given` with every size of the folder's model. Raises InputError if `given` sets a different size."""
    stored = read_model_config(folder)
    if given.preset is not None:
        raise InputError(
            f"model.preset is {given.preset!r}, but the sizes come from model.init_from ({folder / CONFIG}); "
            "leave model.preset out (or set it to null)"
        )
    for key in sorted(given.model_fields_set & stored.model_fields_set):
        mine, theirs = getattr(given, key), getattr(stored, key)
        if mine is not None and mine != theirs:
            raise InputError(
                f"model.{key} is {mine!r}, but the model in model.init_from has {theirs!r} ({folder / CONFIG}); "
                f"leave model.{key} out (or set it to null)"
            )
    return given.model_copy(update={key: getattr(stored, key) for key in stored.model_fields_set})


def find_unsupported(config: dict[str, Any]) -> Iterator[str]:
    """Messages about features of a config.json that this model does not support."""
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        yield f"model_type is {model_type!r}; allowed: {', '.join(ARCHITECTURES)}"
        return
    required = [theirs for ours, theirs in SIZES.items() if ours != "num_kv_heads" or model_type == "qwen3"]
    yield from (f"{key} is missing" for key in required if config.get(key) is None)
    for key, only in FIXED.items():
        if config.get(key, only) != only:
            yield f"{key} is {config[key]!r}; allowed: {only!r}"
    if config.get("sliding_window") is not None and config.get("use_sliding_window", model_type == "llama"):
        yield f"sliding_window is {config['sliding_window']!r}; attention here sees the whole sequence"
    if unknown := set(config.get("layer_types") or ()) - {"full_attention"}:
        yield f"layer_types has {', '.join(map(repr, sorted(unknown)))}; allowed: 'full_attention'"
    rope_type = _rope_settings(config).get("rope_type", _rope_settings(config).get("type", "default"))
    if rope_type != "default":
        yield f"rope_scaling has rope_type {rope_type!r}; allowed: default (RoPE scaling is not supported)"
    yield from _find_unsupported_heads(config, model_type)


def _find_unsupported_heads(config: dict[str, Any], model_type: str) -> Iterator[str]:
    """Message if the head size is not the model's width divided by the number of heads."""
    dim, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(dim, int) or not isinstance(num_heads, int) or num_heads < 1:
        return
    head_dim = config.get("head_dim") or (128 if model_type == "qwen3" else dim // num_heads)
    if head_dim * num_heads != dim:
        yield f"head_dim is {head_dim}; allowed: hidden_size / num_attention_heads = {dim} / {num_heads}"


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The RoPE settings: `rope_parameters` in transformers 5, `rope_scaling` in older versions."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return {"rope_type": str(rope)}  # One setting per layer type, or an unknown form.
    return rope
