"""Error texts for invalid configs, for readers without knowledge of pydantic. Importing this does
not import torch.
"""

import difflib
import types
import typing

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

ALLOWED_VALUES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list, as in [a, b]"),
    "string_type": "text",
    "dict_type": "keys with values",
    "model_type": "a section: keys with values, on the command line section.key=value",
}
"""Description of the allowed values, by pydantic's type of error."""


def explain_errors(error: ValidationError, model: type[BaseModel], prefix: str) -> list[str]:
    """Return one line per error: the key with `prefix` in front, the given value, and what is
    allowed.
    """
    lines = []
    for item in error.errors():
        where = prefix + ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(_unknown_key(where, item["loc"], model))
        else:
            allowed = _allowed(item)
            got = "" if isinstance(item["input"], dict | BaseModel) else f"got {item['input']!r}; "
            lines.append(
                f"{where or 'config'}: {got}allowed: {allowed}"
                if got
                else f"{where}: {allowed}".lstrip(": ")
            )
    return lines


def _allowed(item: ErrorDetails) -> str:
    if item["type"] == "string_pattern_mismatch":
        return f"text that matches {item.get('ctx', {}).get('pattern')}"
    message = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return ALLOWED_VALUES.get(item["type"], message)


def _unknown_key(where: str, loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    section = _section_at(model, loc[:-1])
    keys = list(section.model_fields) if section else []
    near = difflib.get_close_matches(str(loc[-1]), keys, n=1, cutoff=0.5)
    children = {name: _section_at(section, (name,)) for name in keys} if section else {}
    homes = [name for name, child in children.items() if child and loc[-1] in child.model_fields]
    if homes:
        return (
            f"{where}: unknown key; did you mean "
            f"{' or '.join(f'{name}.{loc[-1]}' for name in homes)}?"
        )
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(keys)}"
    return f"{where}: unknown key; {hint}"


def _section_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    annotation: object = model
    for part in loc:
        if isinstance(part, int):  # The number of an entry of a list.
            annotation = next(iter(typing.get_args(annotation)), None)
            continue
        section = _as_section(annotation)
        field = section.model_fields.get(part) if section else None
        annotation = field.annotation if field else None
    return _as_section(annotation)


def _as_section(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    return (
        annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    )
