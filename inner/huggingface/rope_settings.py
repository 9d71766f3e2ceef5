"""Convert RoPE settings between a Hugging Face config.json and the model config. No torch here."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from inner.config import ROPE_KEYS, RopeScaling
from inner.huggingface.type_table import FULL, MODEL_TYPES, SLIDING, ModelType
from inner.model.sizes import ModelSizes

IGNORED = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
"""Keys of the settings that other code reads or checks."""
NO_CHANGE = {"truncate": True}
"""Keys that are allowed with the value that changes nothing."""


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE's settings in a config.json: `rope_parameters` in transformers 5, `rope_scaling`
    in older versions.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (
        MODEL_TYPES[config["model_type"]].has_rope_by_layer_type
        and isinstance(rope, dict)
        and FULL in rope
    ):
        rope = rope[FULL] or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return {"rope_type": str(rope)}  # One setting per layer type, or an unknown form.
    return rope


def read_theta(config: dict[str, Any], model_type: ModelType) -> float:
    """Return the base of the wavelengths; that of the type if the config.json does not give it."""
    given = rope_settings(config).get("rope_theta") or config.get(model_type.theta_key)
    return model_type.rope_theta if given is None else given


def read_window_theta(config: dict[str, Any], model_type: ModelType) -> float | None:
    """Return the base of the wavelengths in layers with a window, where RoPE is then not scaled;
    None if RoPE is there as in other layers.
    """
    if not model_type.has_rope_by_layer_type:
        return None
    rope = config.get("rope_parameters") or {}
    theta = read_theta(config, model_type)
    default = config.get("rope_local_base_freq", model_type.window_theta or theta)
    of_windows = (rope.get(SLIDING) or {}).get("rope_theta", default)
    return None if of_windows == theta and _type_of(config) == "default" else of_windows


def read_scaling(config: dict[str, Any]) -> RopeScaling | None:
    """Return the scaling in a config.json, or None. Raises pydantic's ValidationError if its values
    are not allowed.
    """
    rope = rope_settings(config)
    rope_type = _type_of(config)
    if rope_type == "default":
        return None
    values = {key: value for key, value in rope.items() if key not in IGNORED | NO_CHANGE.keys()}
    # transformers takes a 0 as if the key were missing.
    values |= {key: None for key in ("mscale", "mscale_all_dim") if values.get(key) == 0}
    length = config.get("max_position_embeddings")
    if rope_type == "dynamic":
        # transformers uses the config's length as the length of a sequence, whatever the RoPE
        # settings contain.
        values["original_max_position_embeddings"] = length
    elif rope_type in ("llama3", "yarn"):
        values.setdefault("original_max_position_embeddings", length)
    return RopeScaling.model_validate({"rope_type": rope_type, **values})


def find_unsupported_rope(config: dict[str, Any]) -> Iterator[str]:
    """Yield messages about settings of RoPE that this model does not support."""
    rope = rope_settings(config)
    rope_type = _type_of(config)
    is_partial = MODEL_TYPES[config["model_type"]].rotary_factor is not None
    if rope.get("partial_rotary_factor") not in (None, 1.0) and not is_partial:
        yield f"partial_rotary_factor is {rope['partial_rotary_factor']!r}; allowed: 1.0"
    of_windows = config.get("rope_parameters") or {}
    if MODEL_TYPES[config["model_type"]].has_rope_by_layer_type and isinstance(
        of_windows.get(SLIDING), dict
    ):
        window_type = of_windows[SLIDING].get("rope_type", "default")
        if window_type != "default":
            yield f"rope_parameters.{SLIDING} has rope_type {window_type!r}; allowed: default"
    if rope_type == "default":
        return
    if rope_type not in ROPE_KEYS:
        yield f"rope_scaling has rope_type {rope_type!r}; allowed: default, {', '.join(ROPE_KEYS)}"
        return
    unused = rope.keys() - RopeScaling.model_fields.keys() - IGNORED
    if other := sorted(key for key in unused if rope[key] != NO_CHANGE.get(key, ...)):
        yield (
            f"rope_scaling has {', '.join(f'{key} {rope[key]!r}' for key in other)}, which is "
            "not supported here"
        )
        return
    try:
        read_scaling(config)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(["rope_scaling", *map(str, problem["loc"])])
        yield f"{where}: {problem['msg'].removeprefix('Value error, ')}"


def build_rope_settings(sizes: ModelSizes, seq_len: int, model_type: ModelType) -> dict[str, Any]:
    """Return the keys of a config.json that define RoPE, for a model trained on sequences of
    `seq_len`.
    """
    if sizes.decoder.positions != "rope":
        return {}
    scaling = sizes.rope_scaling
    # Dynamic scaling begins beyond the length in the config.
    is_dynamic = scaling is not None and scaling.rope_type == "dynamic"
    scaled = None if scaling is None else scaling.model_dump(exclude_none=True)
    by_layer_type: dict[str, Any] = {}
    if model_type.has_rope_by_layer_type:
        window = sizes.decoder.window
        of_windows = (
            sizes.rope_theta if window is None or window.rope_theta is None else window.rope_theta
        )
        full = {"rope_type": "default", **(scaled or {}), "rope_theta": sizes.rope_theta}
        sliding = {"rope_type": "default", "rope_theta": of_windows}
        by_layer_type = {
            "rope_parameters": {FULL: full, SLIDING: sliding},
            "rope_local_base_freq": of_windows,
        }
    return {
        **by_layer_type,
        model_type.theta_key: sizes.rope_theta,
        "rope_scaling": scaled,
        "max_position_embeddings": scaling.original_length
        if scaling is not None and is_dynamic
        else seq_len,
    }


def _type_of(config: dict[str, Any]) -> str:
    rope = rope_settings(config)
    return rope.get("rope_type") or rope.get("type") or "default"
