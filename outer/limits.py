"""Limits for the length of a message and for its number of items. Both follow from the bounds of
its fields.

A peer's bytes are parsed only if they are within these limits, so that no message costs more than
its kind may cost. The limits count bytes and items: the opening brackets and the commas, even
inside texts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

MAX_BYTES = 5 << 20
"""Limit for the bytes of any message: a proof of 17 certificates of 1,024 islands fits."""
MAX_ITEMS = 1 << 16
"""Limit for the items of any message: a plan of 1,024 islands of 16 ranks each fits."""
_ESCAPED_BYTES = 6  # size of a control character in JSON
_FLOAT_BYTES = 25
_COLLECTIONS = ("list", "tuple", "dict", "set")

Schema = Mapping[str, Any]
"""A core schema of pydantic, which contains the bounds of all fields."""


@dataclass(frozen=True)
class Limit:
    """The size of the longest message of a kind."""

    num_bytes: int
    num_items: int

    def __add__(self, other: "Limit") -> "Limit":
        return Limit(self.num_bytes + other.num_bytes, self.num_items + other.num_items)

    def times(self, number: int) -> "Limit":
        return Limit(number * self.num_bytes, number * self.num_items)


class UnboundedFieldError(TypeError):
    """A field of a message has no bound. This is a programming error, which a test finds."""


@lru_cache(maxsize=256)
def limit_of(model: type[BaseModel]) -> Limit:
    """Return the limit of a kind of message. Raises UnboundedFieldError if one of its fields has
    no bound.
    """
    schema: Any = model.__pydantic_core_schema__
    definitions = {each["ref"]: each for each in schema.get("definitions", ())}
    longest = _measure(schema, definitions, model.__name__)
    return Limit(min(longest.num_bytes, MAX_BYTES), min(longest.num_items, MAX_ITEMS))


def excess(model: type[BaseModel], body: bytes) -> str:
    """Return a text about what exceeds a message's limit; "" if the message is within the limit."""
    limit = limit_of(model)
    if len(body) > limit.num_bytes:
        return f"a {model.__name__} of {len(body)} bytes, at most {limit.num_bytes} are allowed"
    if len(body) > limit.num_items and (found := count_items(body)) > limit.num_items:
        return f"a {model.__name__} of {found} items, at most {limit.num_items} are allowed"
    return ""


def count_items(body: bytes) -> int:
    """Return the number of opening brackets and commas in a text."""
    return sum(body.count(character) for character in (b"[", b"{", b","))


def fail_fast(schema: Any) -> Any:
    """Return the schema with parsing changed to stop at the first wrong item of every list,
    tuple and dict.
    """
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
    """Return the size of the longest JSON that this part of a schema accepts."""

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
    """Return the size of the longest JSON of a text or a number."""
    match schema["type"]:
        case "str":
            length = _bound(schema, ("max_length",), where)
            return Limit(2 + length * (1 if "pattern" in schema else _ESCAPED_BYTES), length)
        case "int":
            lowest = _bound(schema, ("ge", "gt"), where)
            highest = _bound(schema, ("le", "lt"), where)
            return Limit(max(len(str(lowest)), len(str(highest))), 0)
        case "float":
            for names in (("ge", "gt"), ("le", "lt")):
                _bound(schema, names, where)
            return Limit(_FLOAT_BYTES, 0)
        case "bool":
            return Limit(5, 0)
        case "literal":
            return Limit(2 + max(len(str(value)) for value in schema["expected"]), 0)
    raise UnboundedFieldError(f"{where}: the length of a {schema['type']} has no known bound")


def _collection(content: Limit, number: int) -> Limit:
    """Return the size of a collection: brackets, its content, and commas between `number` items."""
    return content + Limit(2 + number, 1 + number)


def _repeated(item: Limit, schema: Schema, where: str) -> Limit:
    number = _bound(schema, ("max_length",), where)
    return _collection(item.times(number), number)


def _bound(schema: Schema, names: tuple[str, ...], where: str) -> int:
    """Return the bound under the first of these names that the schema has."""
    for name in names:
        if schema.get(name) is not None:
            return schema[name]
    raise UnboundedFieldError(f"{where}: a {schema['type']} without a bound ({' or '.join(names)})")


def _longest_name(name: str, field: Schema) -> int:
    """Return the length of the longest name of a field in JSON, with its quotation marks."""
    choices = field.get("validation_alias") or [[name]]
    names = [choices] if isinstance(choices, str) else [each[0] for each in choices]
    return 2 + max(map(len, [name, *names]))
