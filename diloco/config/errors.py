"""What pydantic finds wrong with a config, said for people who do not know pydantic. No torch here."""

import difflib
import types
import typing

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

PLAIN = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list, as in [a, b]",
    "tuple_type": "a list, as in [a, b]",
    "dict_type": "keys with values",
    "model_type": "a section: keys with values, on the command line section.key=value",
}
"""What is allowed, by pydantic's name of the error."""


def explain(error: ValidationError, model: type[BaseModel], prefix: str) -> list[str]:
    """One line an error: where, what was got, what is allowed."""
    lines = []
    for item in error.errors():
        where = prefix + ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(_unknown_key(where, item["loc"], model))
        else:
            allowed = _allowed(item)
            got = "" if isinstance(item["input"], dict | BaseModel) else f"got {item['input']!r}; "
            lines.append(f"{where or 'config'}: {got}allowed: {allowed}" if got else f"{where}: {allowed}".lstrip(": "))
    return lines


def _allowed(item: ErrorDetails) -> str:
    if item["type"] == "string_pattern_mismatch":
        return f"text that matches {item.get('ctx', {}).get('pattern')}"
    said = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return PLAIN.get(item["type"], said)


def _unknown_key(where: str, loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    section = _section_at(model, loc[:-1])
    keys = list(section.model_fields) if section else []
    near = difflib.get_close_matches(str(loc[-1]), keys, n=1, cutoff=0.5)
    homes = [name for name in keys if loc[-1] in _keys_of(section, name)]
    if homes:
        return f"{where}: unknown key; did you mean {' or '.join(f'{name}.{loc[-1]}' for name in homes)}?"
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(keys)}"
    return f"{where}: unknown key; {hint}"


def _keys_of(model: type[BaseModel] | None, name: str) -> list[str]:
    section = _section_at(model, (name,)) if model else None
    return list(section.model_fields) if section else []


def _section_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    for part in loc:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        if isinstance(annotation, types.UnionType):
            annotation = typing.get_args(annotation)[0]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        model = annotation
    return model
