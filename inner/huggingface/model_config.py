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
from inner.huggingface.decoders import is_new_falcon, read_decoder
from inner.huggingface.mixtures import mixture_keys, num_predictors, read_experts, read_latent
from inner.huggingface.model_types import (
    build_type_keys,
    choose_model_type,
    find_export_obstacles,
    find_unsupported,
    read_head_dim,
)
from inner.huggingface.names import names_of
from inner.huggingface.rope_settings import build_rope_settings, read_scaling, read_theta
from inner.huggingface.type_table import MODEL_TYPES
from inner.model.sizes import ModelSizes, resolve_sizes

CONFIG = "config.json"


def build_config_json(
    sizes: ModelSizes, seq_len: int, dtype: str, bos_id: int | None, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """Build the config.json of a model for sequences of up to `seq_len`, with weights stored as
    `dtype`.
    """
    model_type = MODEL_TYPES[choose_model_type(sizes)]
    return {
        **{theirs: getattr(sizes, ours) for ours, theirs in model_type.size_keys.items()},
        # The width of an expert may replace that of dense layers.
        **({"hidden_act": "silu"} if model_type.activation_key == "hidden_act" else {}),
        **build_type_keys(sizes),
        # In latent attention it is the size of what RoPE turns, which is less than a head.
        **(
            {"head_dim": sizes.head_dim if sizes.latent is None else sizes.rope_dim}
            if model_type.has_head_dim
            else {}
        ),
        model_type.norm_eps_key: sizes.norm_eps,
        model_type.length_key: sizes.decoder.max_positions or seq_len,
        **build_rope_settings(sizes, seq_len, model_type),
        "tie_word_embeddings": sizes.tie_embeddings,
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
    model_type = MODEL_TYPES.get(config.get("model_type", ""))
    key = "max_position_embeddings" if model_type is None else model_type.length_key
    length = config.get(key, None if model_type is None else model_type.default_length)
    if not isinstance(length, int) or length < 1:
        raise InputError(f"{folder / CONFIG}: {key} is {length!r}; allowed: a number of tokens")
    return length


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
            f"{path}: cannot be read: {error.strerror}; give a folder with config.json and "
            "*.safetensors, as written by `diloco export` or found in a model on the hub"
        ) from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: got a JSON {type(values).__name__}, need an object")
    return values


def read_model_config(folder: Path) -> ModelConfig:
    """Read the model config of a folder, with every size set. Raises InputError that lists all
    unsupported features.
    """
    config = read_config(folder)
    with refused(
        f"{folder / CONFIG}: a value has another type than transformers writes", "copy it again"
    ):
        return _parse_model_config(config, folder)


def _parse_model_config(config: dict[str, Any], folder: Path) -> ModelConfig:
    unsupported = list(find_unsupported(config))
    if unsupported:
        listed = "\n".join(f"  {line}" for line in unsupported)
        raise InputError(f"{folder / CONFIG}: this model is not supported:\n{listed}")
    model_type = MODEL_TYPES[config["model_type"]]
    try:
        model = ModelConfig.model_validate(
            {
                **_read_sizes(config),
                "head_dim": read_head_dim(config),
                "rope_theta": read_theta(config, model_type),
                "rope_scaling": read_scaling(config),
                "norm_eps": config.get(model_type.norm_eps_key, model_type.norm_eps),
                "qk_norm": model_type.qk_norm,
                "qkv_bias": _reads_qkv_bias(config),
                "tie_embeddings": config.get("tie_word_embeddings", model_type.ties),
                "decoder": read_decoder(config),
                "experts": read_experts(config),
                "latent": read_latent(config),
            }
        )
        return _name_type(model, config["model_type"])
    except ValidationError as error:
        problem = error.errors()[0]
        ours = ".".join(map(str, problem["loc"]))
        theirs = {**model_type.size_keys, **mixture_keys(config["model_type"])}
        message = problem["msg"].removeprefix("Value error, ")
        got = "" if problem["type"] == "value_error" else f"got {problem['input']!r}; allowed: "
        where = f"{theirs.get(ours, ours)}: " if ours else ""
        raise InputError(f"{folder / CONFIG}: {where}{got}{message}") from None


def _name_type(model: ModelConfig, model_type: str) -> ModelConfig:
    """Return the config with the model type of its folder, if an export would otherwise be of a
    type that arranges tensors in another way.
    """
    sizes = resolve_sizes(model, 0)
    if find_export_obstacles(sizes, 0.0) or names_of(choose_model_type(sizes)) == names_of(
        model_type
    ):
        return model
    return model.model_copy(update={"model_type": model_type})


def _read_sizes(config: dict[str, Any]) -> dict[str, Any]:
    model_type = MODEL_TYPES[config["model_type"]]
    values: dict[str, Any] = {
        ours: config.get(theirs) for ours, theirs in model_type.size_keys.items()
    }
    if config["model_type"] == "falcon" and not is_new_falcon(config):
        # The older architecture has one key head, or as many as query heads, whatever num_kv_heads
        # says.
        values["num_kv_heads"] = 1 if config.get("multi_query", True) else None
    if values.get("num_kv_heads") is None:
        values["num_kv_heads"] = values["num_heads"]
    if values.get("ffn_dim") is None:
        values["ffn_dim"] = 4 * values["dim"]
    return values


def _reads_qkv_bias(config: dict[str, Any]) -> bool:
    model_type = MODEL_TYPES[config["model_type"]]
    switches = [
        (key, default)
        for key, (names, default) in model_type.bias_keys.items()
        if "qkv_bias" in names
    ]
    return model_type.qkv_bias or any(bool(config.get(key, default)) for key, default in switches)


def fill_sizes_from_folder(given: ModelConfig, folder: Path) -> ModelConfig:
    """Return a copy of `given` with every size of the folder's model. Raises InputError if `given`
    sets a different size.
    """
    stored = read_model_config(folder)
    if given.preset is not None:
        raise InputError(
            f"model.preset is {given.preset!r}, but the sizes come from model.init_from "
            f"({folder / CONFIG}); leave model.preset out (or set it to null)"
        )
    if given.experts is not None and stored.experts is None:
        raise InputError(
            "model.experts is set, but the model in model.init_from has no experts "
            f"({folder / CONFIG}), and weights "
            "of a dense model cannot become those of a mixture of experts; leave model.experts out"
        )
    _check_depths(given, folder)
    for key in sorted(given.model_fields_set & stored.model_fields_set):
        mine = getattr(given, key)
        theirs = getattr(stored, key)
        if mine is not None and mine != theirs:
            raise InputError(
                f"model.{key} is {mine!r}, but the model in model.init_from has {theirs!r} "
                f"({folder / CONFIG}); leave model.{key} out (or set it to null)"
            )
    return given.model_copy(update={key: getattr(stored, key) for key in stored.model_fields_set})


def _check_depths(given: ModelConfig, folder: Path) -> None:
    """Raise InputError if the folder has fewer layers that predict further tokens than `given`."""
    stored = num_predictors(read_config(folder))
    if given.predict is not None and given.predict.depths > stored:
        cure = f"set it to {stored} or less" if stored else "leave model.predict out"
        raise InputError(
            f"model.predict.depths is {given.predict.depths}, but the model in model.init_from has "
            f"{stored} layers that predict further tokens ({folder / CONFIG}); {cure}"
        )
