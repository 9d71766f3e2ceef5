"""Replace values of a config by values of the command line or of an island. Does not import
torch.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from pydantic import BaseModel

from diloco.errors import ConfigError
from inner.foreign.text import parse_yaml

PARAM_NAMES = "param_names"


def apply_override(values: dict[str, Any], override: str) -> None:
    """Apply an override `section.key=value` to the values of a config file, in place. Raises
    ConfigError.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"got {override!r} on the command line; an override is written section.key=value"
        )
    try:
        value = parse_yaml(text)
    except ValueError:
        value = text
    set_value(values, key, value, repr(override))


def set_value(values: dict[str, Any], key: str, value: object, where: str) -> None:
    """Set the value of a dotted key in the values of a config file, in place. Raises ConfigError,
    with `where`.
    """
    _set(values, key, value, where)
    islands = values.get("islands")
    if key.startswith("island.") and isinstance(islands, list):
        # The values in `islands` have precedence over `island`, so they would override this value.
        for island in islands:
            if isinstance(island, dict):
                _set(island, key.removeprefix("island."), value, where)


def _set(target: dict[str, Any], key: str, value: object, where: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        child = target.setdefault(section, {})
        if child is None:
            child = target[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{where}: {section!r} is a value, not a section")
        target = child
    target[last] = value


def merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `change`; sections are merged key by key."""
    both = {
        key
        for key, value in change.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return base | change | {key: merge(base[key], change[key]) for key in both}


def differing_keys(ours: BaseModel, theirs: BaseModel) -> list[str]:
    """Return one line for each key that differs between two runs, with both values."""
    flat_ours = flatten(ours.model_dump(mode="json"))
    flat_theirs = flatten(theirs.model_dump(mode="json"))
    names = flat_ours.pop(PARAM_NAMES, []), flat_theirs.pop(PARAM_NAMES, [])
    lines = [
        f"{key}: here {flat_ours.get(key)!r}, in the run {flat_theirs.get(key)!r}"
        for key in flat_ours | flat_theirs
        if flat_ours.get(key) != flat_theirs.get(key)
    ]
    return lines + ([] if names[0] == names[1] else [differing_param(*names)])


def differing_param(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return a line with the first parameter that differs between two lists of
    RunConfig.param_names.
    """
    before = ""
    for mine, other in zip_longest(ours, theirs):
        if mine != other:
            here = "none" if mine is None else repr(param_after(before, mine))
            there = "none" if other is None else repr(param_after(before, other))
            return f"the first parameter that differs: here {here}, in the run {there}"
        before = param_after(before, mine)
    raise AssertionError("the lists are equal")


def param_after(before: str, entry: str) -> str:
    """Return the parameter of an entry of RunConfig.param_names, given the parameter before it."""
    shared, _, rest = entry.partition(":")
    return before[: int(shared)] + rest if shared.isdecimal() and len(shared) < 10 else entry


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a dumped config by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
