"""List every setting of a config: what is allowed, its default, its meaning. Importing this does
not import torch.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from diloco.config.schema import Config

LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "string": "text",
    "null": "null",
}
"""Words for the types of JSON Schema."""
NO_DEFAULT = "must be given"
PAGE_HEAD = """# All settings

Written by `diloco settings --markdown`. [configuration.md](configuration.md) has the settings that
are changed most. A key is set in the file or on the command line, as `outer.codec=int8`. The keys
before `island` are the same on every island of a run. `island` has what each island decides for
itself, and `islands` the differences between islands.
"""


@dataclass(frozen=True)
class Setting:
    """A key of the config."""

    key: str
    """Name with sections, for example `outer.optimizer.lr`. `[]` follows a list of sections:
    `data.mixture[].weight`."""
    allowed: str
    default: str
    meaning: str


@cache
def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config file, with which editors complete and check keys."""
    return Config.model_json_schema()


def list_settings() -> list[Setting]:
    """Return all settings, in the order of the config."""
    return list(_settings_of(config_schema(), ""))


def find_settings(text: str) -> list[Setting]:
    """Return the settings whose key or meaning contains the text, regardless of case."""
    return [
        each for each in list_settings() if text.lower() in f"{each.key} {each.meaning}".lower()
    ]


def nearest_setting(text: str) -> str | None:
    """Return the key whose name, or last part, is the nearest to `text`; None if none is near."""
    keys = [each.key for each in list_settings()]
    last_parts = {key.rpartition(".")[2]: key for key in reversed(keys)}
    near = difflib.get_close_matches(text, [*keys, *last_parts], n=1, cutoff=0.7)
    return last_parts.get(near[0], near[0]) if near else None


def settings_page() -> str:
    """Return the page of all settings in Markdown, docs/settings.md."""
    lines = [PAGE_HEAD, "| key | allowed | default | meaning |", "|---|---|---|---|"]
    for each in list_settings():
        cells = (f"`{each.key}`", each.allowed, f"`{each.default}`", each.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _settings_of(section: dict[str, Any], prefix: str) -> Iterator[Setting]:
    required = section.get("required", ())
    for name, field in section["properties"].items():
        below = _sections_below(field)
        if below is None or "description" in field:
            default = (
                NO_DEFAULT if name in required else _value_text(field.get("default", _empty(field)))
            )
            yield Setting(
                prefix + name,
                _allowed(field),
                default,
                " ".join(field.get("description", "").split()),
            )
        if below is not None:
            yield from _settings_of(
                below, f"{prefix}{name}{'[]' if field.get('type') == 'array' else ''}."
            )


def _sections_below(field: dict[str, Any]) -> dict[str, Any] | None:
    """Return the section that a key holds, or whose list it holds; None if the key holds a
    value.
    """
    forms = [field, *field.get("anyOf", ()), field.get("items", {})]
    names = [form["$ref"].rpartition("/")[2] for form in forms if "$ref" in form]
    return config_schema()["$defs"][names[0]] if names else None


def _allowed(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_allowed(form) for form in field["anyOf"]))
    if "enum" in field:
        return ", ".join(map(_value_text, field["enum"]))
    if "const" in field:
        return _value_text(field["const"])
    if "$ref" in field:
        return "a section"
    if field["type"] == "array":
        return _allowed_list(field)
    if field["type"] == "object":
        return "keys with values"
    limits = [f"{words} {field[name]:g}" for name, words in LIMITS.items() if name in field]
    return " ".join([TYPES[field["type"]], " and ".join(limits)]).strip()


def _allowed_list(field: dict[str, Any]) -> str:
    if "prefixItems" in field:
        return f"[{', '.join(_allowed(form) for form in field['prefixItems'])}]"
    return "list of sections" if "$ref" in field["items"] else f"list of {_allowed(field['items'])}"


def _empty(field: dict[str, Any]) -> list[Any] | dict[str, Any]:
    return [] if field.get("type") == "array" else {}


def _value_text(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or '""'
