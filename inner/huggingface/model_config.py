"""Convert between model sizes and a Hugging Face config.json. No torch here.

A config.json that asks for a feature which this model does not have is refused; nothing is silently
ignored.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from inner.config import ModelConfig
from inner.errors import InputError, refused
from inner.foreign.text import read_json
from inner.huggingface.mixtures import mixture_keys, num_predictors, read_experts, read_latent
from inner.huggingface.model_types import (
    MODEL_TYPES,
    SIZES,
    build_type_keys,
    find_unsupported,
    find_window,
    read_head_dim,
)
from inner.huggingface.rope_settings import build_rope_settings, read_scaling, read_theta
from inner.model.sizes import ModelSizes

CONFIG = "config.json"


def build_config_json(
    sizes: ModelSizes, seq_len: int, dtype: str, bos_id: int | None, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """Build the config.json of a model for sequences of up to `seq_len`, with weights stored as `dtype`."""
    return {
        **{theirs: getattr(sizes, ours) for ours, theirs in SIZES.items()},
        # The width of an expert may replace that of dense layers.
        **build_type_keys(sizes),
        # The size of what RoPE turns; in latent attention that is less than a head.
        "head_dim": sizes.rope_dim,
        "rms_norm_eps": sizes.norm_eps,
        **build_rope_settings(sizes, seq_len),
        "tie_word_embeddings": sizes.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": bos_id,
        "eos_token_id": one_or_list(eos_ids),
        "torch_dtype": dtype,
        "use_cache": True,
    }


def one_or_list(ids: Sequence[int]) -> int | list[int]:
    """Return the ids that end a text in the form of a config.json: a single id, or a list."""
    return ids[0] if len(ids) == 1 else list(ids)


def read_length(folder: Path, config: dict[str, Any]) -> int:
    """Return the length of the longest sequences for which this program computes the same as a
    folder's model.

    Raises InputError if the config does not contain it.
    """
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length < 1:
        raise InputError(f"{folder / CONFIG}: max_position_embeddings is {length!r}; allowed: a number of tokens")
    window = find_window(config) if config.get("model_type") in MODEL_TYPES else None
    return min(length, window) if isinstance(window, int) and window > 0 else length


def read_special_ids(config: dict[str, Any], vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Return bos_token_id or None, and all eos_token_ids of a config.json. Ids that the model does
    not have are left out.
    """
    bos = config.get("bos_token_id")
    eos = config.get("eos_token_id")
    listed = eos if isinstance(eos, list) else [eos]
    known = [each for each in (bos, *listed) if type(each) is int and 0 <= each < vocab_size]
    return (bos if bos in known else None), tuple(each for each in listed if each in known)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json. Raises InputError if it is missing or damaged."""
    path = folder / CONFIG
    try:
        values = read_json(path, "JSON")
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}; give a folder with config.json and *.safetensors, as "
            "written by `diloco export` or found in a model on the hub"
        ) from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: got a JSON {type(values).__name__}, need an object")
    return values


def read_model_config(folder: Path, longest: int | None = None) -> ModelConfig:
    """Read the model config of a folder, with every size set. Raises InputError that lists all
    unsupported features.

    `longest`: number of tokens in the longest sequence that will be computed; None: the maximum of
    the model.
    """
    config = read_config(folder)
    with refused(f"{folder / CONFIG}: a value has another type than transformers writes", "copy it again"):
        return _parse_model_config(config, folder, longest)


def _parse_model_config(config: dict[str, Any], folder: Path, longest: int | None) -> ModelConfig:
    unsupported = list(find_unsupported(config, longest))
    if unsupported:
        listed = "\n".join(f"  {line}" for line in unsupported)
        raise InputError(f"{folder / CONFIG}: this model is not supported:\n{listed}")
    values: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in SIZES.items()}
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = values["num_heads"]
    model_type = MODEL_TYPES[config["model_type"]]
    try:
        return ModelConfig.model_validate(
            {
                **values,
                "head_dim": read_head_dim(config),
                "rope_theta": read_theta(config, model_type.rope_theta),
                "rope_scaling": read_scaling(config),
                "norm_eps": config.get("rms_norm_eps", model_type.norm_eps),
                "qk_norm": model_type.qk_norm,
                "qkv_bias": model_type.qkv_bias,
                "tie_embeddings": config.get("tie_word_embeddings", False),
                "experts": read_experts(config),
                "latent": read_latent(config),
            }
        )
    except ValidationError as error:
        problem = error.errors()[0]
        ours = ".".join(map(str, problem["loc"]))
        theirs = SIZES | mixture_keys(config["model_type"])
        message = problem["msg"].removeprefix("Value error, ")
        got = "" if problem["type"] == "value_error" else f"got {problem['input']!r}; allowed: "
        raise InputError(f"{folder / CONFIG}: {theirs.get(ours, ours)}: {got}{message}") from None


def fill_sizes_from_folder(given: ModelConfig, folder: Path, longest: int | None = None) -> ModelConfig:
    """Return a copy of `given` with every size of the folder's model. Raises InputError if `given`
    sets a different size.

    `longest`: as in `read_model_config`.
    """
    stored = read_model_config(folder, longest)
    if given.preset is not None:
        raise InputError(
            f"model.preset is {given.preset!r}, but the sizes come from model.init_from ({folder / CONFIG}); "
            "leave model.preset out (or set it to null)"
        )
    if given.experts is not None and stored.experts is None:
        raise InputError(
            f"model.experts is set, but the model in model.init_from has no experts ({folder / CONFIG}), and weights "
            "of a dense model cannot become those of a mixture of experts; leave model.experts out"
        )
    _check_depths(given, folder)
    for key in sorted(given.model_fields_set & stored.model_fields_set):
        mine = getattr(given, key)
        theirs = getattr(stored, key)
        if mine is not None and mine != theirs:
            raise InputError(
                f"model.{key} is {mine!r}, but the model in model.init_from has {theirs!r} ({folder / CONFIG}); "
                f"leave model.{key} out (or set it to null)"
            )
    return given.model_copy(update={key: getattr(stored, key) for key in stored.model_fields_set})


def _check_depths(given: ModelConfig, folder: Path) -> None:
    """Raise InputError if the folder has fewer layers that predict further tokens than `given`."""
    stored = num_predictors(read_config(folder))
    if given.predict is not None and given.predict.depths > stored:
        cure = f"set it to {stored} or less" if stored else "leave model.predict out"
        raise InputError(
            f"model.predict.depths is {given.predict.depths}, but the model in model.init_from has {stored} layers "
            f"that predict further tokens ({folder / CONFIG}); {cure}"
        )
