"""How long a message may be, and how many items it may have: both follow from the bounds of its fields.

A peer's bytes are parsed only if they keep within these limits, so that no message costs more than its kind may. What
is counted are bytes, and items: the opening brackets and the commas, wherever they stand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

MAX_BYTES = 5 << 20
"""Limit for any message: a proof of 17 certificates of 1,024 islands fits."""
MAX_ITEMS = 1 << 16
"""Limit for any message: a plan of 1,024 islands of 16 ranks each fits."""
_ESCAPED_BYTES = 6  # of a character in JSON, if it is a control character
_FLOAT_BYTES = 25
_COLLECTIONS = ("list", "tuple", "dict", "set")

Schema = Mapping[str, Any]
"""A core schema of pydantic, in which the bounds of all fields stand."""


@dataclass(frozen=True)
class Limit:
    """The longest message of a kind."""

    num_bytes: int
    num_items: int

    def __add__(self, other: "Limit") -> "Limit":
        return Limit(self.num_bytes + other.num_bytes, self.num_items + other.num_items)

    def times(self, number: int) -> "Limit":
        return Limit(number * self.num_bytes, number * self.num_items)


class UnboundedFieldError(TypeError):
    """A field of a message has no bound: a mistake of ours, which a test finds."""


@lru_cache(maxsize=256)
def limit_of(model: type[BaseModel]) -> Limit:
    """The limit of a kind of message. Raises UnboundedFieldError if one of its fields has no bound."""
    schema: Any = model.__pydantic_core_schema__
    definitions = {each["ref"]: each for each in schema.get("definitions", ())}
    longest = _measure(schema, definitions, model.__name__)
    return Limit(min(longest.num_bytes, MAX_BYTES), min(longest.num_items, MAX_ITEMS))


def excess(model: type[BaseModel], body: bytes) -> str:
    """What a message has too much of, in words; "" if it keeps within its limit."""
    limit = limit_of(model)
    if len(body) > limit.num_bytes:
        return f"a {model.__name__} of {len(body)} bytes, at most {limit.num_bytes} are allowed"
    if len(body) > limit.num_items and (found := count_items(body)) > limit.num_items:
        return f"a {model.__name__} of {found} items, at most {limit.num_items} are allowed"
    return ""


def count_items(body: bytes) -> int:
    """The opening brackets and commas in a text."""
    return sum(body.count(character) for character in (b"[", b"{", b","))


def fail_fast(schema: Any) -> Any:
    """The schema, in which the first wrong item of every list, tuple and dict ends the parse."""
    if isinstance(schema, dict):
        if schema.get("type") in _COLLECTIONS:
            schema["fail_fast"] = True
        for each in schema.values():
            fail_fast(each)
    elif isinstance(schema, list):
        for each in schema:
            fail_fast(each)
    return schema


def _measure(schema: Schema, definitions: Mapping[str, Schema], where: str) -> Limit:
    """The longest JSON that this part of a schema lets through."""

    def inner(part: Schema, name: str = "") -> Limit:
        return _measure(part, definitions, f"{where}.{name}" if name else where)

    match schema["type"]:
        case "definitions":
            return inner(schema["schema"])
        case "definition-ref":
            return inner(definitions[schema["schema_ref"]])
        case "model" | "default" | "function-after" | "function-before" | "function-wrap":
            return inner(schema["schema"])
        case "nullable":
            return inner(schema["schema"]) + Limit(4, 0)
        case "json-or-python":
            return inner(schema["json_schema"])
        case "function-plain":
            return inner(schema["json_schema_input_schema"])
        case "call":  # a named tuple, before pydantic 2.14
            return inner(schema["arguments_schema"])
        case "arguments" | "named-tuple":
            arguments = schema.get("fields") or schema["arguments_schema"]
            fields = [inner(each["schema"], each["name"]) for each in arguments]
            return _collection(sum(fields, Limit(0, 0)), len(fields))
        case "model-fields":
            fields = [
                inner(field["schema"], name) + Limit(_longest_name(name, field) + 3, 0)
                for name, field in schema["fields"].items()
            ]
            return _collection(sum(fields, Limit(0, 0)), len(fields))
        case "list":
            return _repeated(inner(schema["items_schema"]), schema, where)
        case "tuple" if "variadic_item_index" in schema:
            return _repeated(inner(schema["items_schema"][0]), schema, where)
        case "tuple":
            items = [inner(each) for each in schema["items_schema"]]
            return _collection(sum(items, Limit(0, 0)), len(items))
        case "dict":
            entry = inner(schema["keys_schema"]) + inner(schema["values_schema"]) + Limit(1, 0)
            return _repeated(entry, schema, where)
    return _measure_value(schema, where)


def _measure_value(schema: Schema, where: str) -> Limit:
    """The longest JSON of a text or a number."""
    match schema["type"]:
        case "str":
            length = _bound(schema, ("max_length",), where)
            return Limit(2 + length * (1 if "pattern" in schema else _ESCAPED_BYTES), length)
        case "int":
            lowest, highest = _bound(schema, ("ge", "gt"), where), _bound(schema, ("le", "lt"), where)
            return Limit(max(len(str(lowest)), len(str(highest))), 0)
        case "float":
            for names in (("ge", "gt"), ("le", "lt")):
                _bound(schema, names, where)
            return Limit(_FLOAT_BYTES, 0)
        case "bool":
            return Limit(5, 0)
        case "literal":
            return Limit(2 + max(len(str(value)) for value in schema["expected"]), 0)
    raise UnboundedFieldError(f"{where}: nobody knows how long a {schema['type']} can be")


def _collection(content: Limit, number: int) -> Limit:
    """With its brackets, and commas between so many items."""
    return content + Limit(2 + number, 1 + number)


def _repeated(item: Limit, schema: Schema, where: str) -> Limit:
    number = _bound(schema, ("max_length",), where)
    return _collection(item.times(number), number)


def _bound(schema: Schema, names: tuple[str, ...], where: str) -> int:
    """The bound under one of these names."""
    for name in names:
        if schema.get(name) is not None:
            return schema[name]
    raise UnboundedFieldError(f"{where}: a {schema['type']} without a bound ({' or '.join(names)})")


def _longest_name(name: str, field: Schema) -> int:
    """The longest name of a field in JSON, with its quotation marks."""
    choices = field.get("validation_alias") or [[name]]
    names = [choices] if isinstance(choices, str) else [each[0] for each in choices]
    return 2 + max(map(len, [name, *names]))
