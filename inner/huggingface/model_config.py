"""A model's sizes as a Hugging Face config.json, and back. No torch here.

What a config.json asks for and this model does not compute is refused, never left out.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from inner.config import ModelConfig
from inner.errors import InputError
from inner.presets import ModelSizes

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
# What a config.json that leaves them out means, for both.
DEFAULT_THETA, DEFAULT_EPS = 10000.0, 1e-6
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys that this model has but one value for."""


def their_config(sizes: ModelSizes, seq_len: int, dtype: str, bos_id: int | None, eos_id: int) -> dict[str, Any]:
    """The config.json of a model of these sizes, trained on sequences of seq_len; `dtype`: of the stored weights."""
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
    """The folder's config.json. Raises InputError when there is none or it is damaged."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}; give a folder with config.json and *.safetensors, as "
            "`diloco export` writes it or as a model on the hub has it"
        ) from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); write or copy it again") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: got a JSON {type(values).__name__}, need an object")
    return values


def model_in(folder: Path) -> ModelConfig:
    """The model of a folder, with every size given. Raises InputError naming all that this model cannot be."""
    config = read_config(folder)
    found = list(objections(config))
    if found:
        listed = "\n".join(f"  {line}" for line in found)
        raise InputError(f"{folder / CONFIG}: this model cannot be had here:\n{listed}")
    values = {ours: config.get(theirs) for ours, theirs in SIZES.items()}
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = values["num_heads"]
    try:
        return ModelConfig(
            **values,
            rope_theta=_rope(config).get("rope_theta", config.get("rope_theta", DEFAULT_THETA)),
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


def sized_as_in(given: ModelConfig, folder: Path) -> ModelConfig:
    """`given` with every size of the folder's model. Raises InputError where `given` asks for another size."""
    there = model_in(folder)
    if given.preset is not None:
        raise InputError(
            f"model.preset is {given.preset!r}, but the sizes come from model.init_from ({folder / CONFIG}); "
            "leave model.preset out (or set it to null)"
        )
    for key in sorted(given.model_fields_set & there.model_fields_set):
        mine, theirs = getattr(given, key), getattr(there, key)
        if mine is not None and mine != theirs:
            raise InputError(
                f"model.{key} is {mine!r}, but the model in model.init_from has {theirs!r} ({folder / CONFIG}); "
                f"leave model.{key} out (or set it to null)"
            )
    sizes = {key: getattr(there, key) for key in there.model_fields_set}
    return given.model_copy(update=sizes)


def objections(config: dict[str, Any]) -> Iterator[str]:
    """What a config.json asks for that this model does not have."""
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
    if strange := set(config.get("layer_types") or ()) - {"full_attention"}:
        yield f"layer_types has {', '.join(map(repr, sorted(strange)))}; allowed: 'full_attention'"
    rope_type = _rope(config).get("rope_type", _rope(config).get("type", "default"))
    if rope_type != "default":
        yield f"rope_scaling has rope_type {rope_type!r}; allowed: default (RoPE is not stretched here)"
    yield from _head_objections(config, model_type)


def _head_objections(config: dict[str, Any], model_type: str) -> Iterator[str]:
    """Whether heads are as wide as the model divided by their number."""
    dim, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(dim, int) or not isinstance(num_heads, int) or num_heads < 1:
        return
    head_dim = config.get("head_dim") or (128 if model_type == "qwen3" else dim // num_heads)
    if head_dim * num_heads != dim:
        yield f"head_dim is {head_dim}; allowed: hidden_size / num_attention_heads = {dim} / {num_heads}"


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """How positions are turned: transformers 5 calls it rope_parameters, older versions rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return {"rope_type": str(rope)}  # By kind of layer, or nothing known.
    return rope
