"""The costliest bodies of a kind of message that its limits let through, built from the bounds of
its fields.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from outer.limits import Limit, limit_of
from outer.network.messages import Message

Schema = Mapping[str, Any]
WRONG_ITEMS = ("[]", "{}", '{"":0}', "1e999", "[0,0]")
"""Items that hardly any list may have."""
WRAPPERS = (
    "model",
    "default",
    "nullable",
    "function-after",
    "function-before",
    "function-wrap",
    "definitions",
)
HEX = "0123456789abcdef"
Place = Callable[[str], str]
"""The whole body, given the text of one value in it."""


def every_message() -> list[type[Message]]:
    """All kinds of messages that are declared in outer and diloco."""
    return sorted(set(_below(Message)), key=lambda model: (model.__module__, model.__name__))


def _below(base: type[Message]) -> Iterator[type[Message]]:
    for model in base.__subclasses__():
        if model.__module__.startswith(("outer.", "diloco.")):
            yield model
        yield from _below(model)


def costly_bodies(
    model: type[Message], most_bytes: int, *, has_inner: bool = True
) -> Iterator[tuple[str, bytes]]:
    """(name, body) of bodies that fill the limit of the message, or have `most_bytes`, for each of
    its fields.

    With `has_inner` also for the fields of the messages within.
    """
    limit, bounds = limit_of(model), Bounds(model)
    limit = Limit(min(limit.num_bytes, most_bytes), limit.num_items)
    yield "valid", bounds.smallest(bounds.root).encode()
    for variant, text in _junk(limit):
        yield f"itself: {variant}", text.encode()
    for name, place, schema in bounds.places():
        if has_inner or "." not in name:
            used = len(place(""))
            for variant, text in _fillings(
                bounds, schema, Limit(limit.num_bytes - used - 16, limit.num_items - 128)
            ):
                yield f"{name}: {variant}", place(text).encode()


def _junk(limit: Limit) -> Iterator[tuple[str, str]]:
    """What costs the same wherever it stands: JSON is read before anything is checked."""
    room, items = limit.num_bytes - 16, limit.num_items
    yield "digits", "9" * room
    yield "escapes", '"' + "\\u0001" * (room // 6) + '"'
    yield "nested", "[" * min(room, items)
    yield "one field again and again", _object([("a", "0")] * _fit('"a":0', room, items))
    for item in WRONG_ITEMS:
        yield f"items {item}", _array([item] * _fit(item, room, items))


def _fillings(bounds: "Bounds", schema: Schema, limit: Limit) -> Iterator[tuple[str, str]]:
    """Texts in the place of one value that fill the limit."""
    room, items = max(limit.num_bytes, 0), max(limit.num_items, 1)
    inner = bounds.unwrap(schema)
    yield "wrong items", _array(["{}"] * _fit("{}", room, items))
    if inner["type"] == "model-fields":
        yield (
            "unknown fields",
            _object([(f"u{number}", "0") for number in range(_fit('"u000000":0', room, items))]),
        )
    if (item := bounds.item_of(schema)) is not None:
        for name, text in (("smallest", bounds.smallest(item)), ("longest", bounds.longest(item))):
            most = min(_fit(text, room, items), schema_length(inner))
            yield f"{name} items, the last one wrong", _array([text] * (most - 1) + ["{}"])
            yield f"{name} items", _array([text] * most)
    if (entry := bounds.entry_of(schema)) is not None:
        value = bounds.smallest(entry)
        most = min(_fit(f'"k000000":{value}', room, items), schema_length(inner))
        yield "entries", _object([(f"k{number}", value) for number in range(most)])
        yield "wrong entries", _object([(f"k{number}", "{}") for number in range(most)])
        yield "wrong keys", _object([(f"!{number}", value) for number in range(most)])


def _fit(item: str, room: int, items: int) -> int:
    """How many such items fit."""
    each = 1 + sum(map(item.count, "[{,"))
    return max(1, min(room // (len(item) + 1), items // each))


def _array(items: list[str]) -> str:
    return "[" + ",".join(items) + "]"


def _object(entries: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f'"{name}":{value}' for name, value in entries) + "}"


def schema_length(schema: Schema) -> int:
    """Most items of a collection."""
    return schema.get("max_length") or 1 << 30


class Bounds:
    """The schema of a message, and values that keep within its bounds."""

    def __init__(self, model: type[Message]) -> None:
        schema: Any = model.__pydantic_core_schema__
        self.definitions = {each["ref"]: each for each in schema.get("definitions", ())}
        self.root = self.unwrap(schema)

    def unwrap(self, schema: Schema) -> Schema:
        """The schema of the value itself."""
        while True:
            if schema["type"] in WRAPPERS:
                schema = schema["schema"]
            elif schema["type"] == "definition-ref":
                schema = self.definitions[schema["schema_ref"]]
            elif schema["type"] == "function-plain":
                schema = schema["json_schema_input_schema"]
            elif schema["type"] == "call":
                schema = schema["arguments_schema"]
            else:
                return schema

    def places(self) -> Iterator[tuple[str, Place, Schema]]:
        """(name, place, schema) of the message itself and of every field, also those of messages
        within.
        """
        yield "itself", lambda text: text, self.root
        yield from self._places(self.root, "", lambda text: text)

    def _places(
        self, schema: Schema, where: str, outer: Place
    ) -> Iterator[tuple[str, Place, Schema]]:
        schema = self.unwrap(schema)
        if schema["type"] == "model-fields":
            for name, field in schema["fields"].items():

                def place(text: str, name: str = name) -> str:
                    others = {
                        other: self.smallest(each["schema"])
                        for other, each in schema["fields"].items()
                    }
                    return outer(_object(list((others | {name: text}).items())))

                yield f"{where}{name}", place, field["schema"]
                yield from self._places(field["schema"], f"{where}{name}.", place)
        elif (item := self.item_of(schema)) is not None:
            yield from self._places(item, where, lambda text: outer(f"[{text}]"))
        elif (entry := self.entry_of(schema)) is not None:
            yield from self._places(entry, where, lambda text: outer('{"k0":' + text + "}"))

    def item_of(self, schema: Schema) -> Schema | None:
        """The schema of a list's items."""
        schema = self.unwrap(schema)
        if schema["type"] == "list":
            return schema["items_schema"]
        return schema["items_schema"][0] if "variadic_item_index" in schema else None

    def entry_of(self, schema: Schema) -> Schema | None:
        """The schema of a dict's values."""
        schema = self.unwrap(schema)
        return schema["values_schema"] if schema["type"] == "dict" else None

    def smallest(self, schema: Schema) -> str:
        """A short value that keeps within the bounds."""
        return self._value(schema, lambda schema: schema.get("min_length") or 0)

    def longest(self, schema: Schema) -> str:
        """A value with the longest texts that keep within the bounds, and no items that it need not
        have.
        """
        return self._value(schema, lambda schema: schema["max_length"])

    def _value(self, schema: Schema, length: Callable[[Schema], int]) -> str:
        schema = self.unwrap(schema)
        match schema["type"]:
            case "model-fields":
                fields = schema["fields"].items()
                return _object(
                    [(name, self._value(field["schema"], length)) for name, field in fields]
                )
            case "arguments" | "named-tuple":
                fields = schema.get("fields") or schema["arguments_schema"]
                return _array([self._value(field["schema"], length) for field in fields])
            case "tuple" if "variadic_item_index" not in schema:
                return _array([self._value(each, length) for each in schema["items_schema"]])
            case "list" | "tuple":
                item = self._value(self.item_of(schema) or {}, length)
                return _array([item] * (schema.get("min_length") or 0))
            case "dict":
                return "{}"
            case "str":
                return json.dumps(_text(schema, length(schema)))
            case "int":
                return str(schema.get("ge", 0))
            case "float":
                return "1.5" if schema.get("le", 2) >= 1.5 else "0.5"
            case "bool":
                return "true"
            case "literal":
                return json.dumps(schema["expected"][0])
        raise NotImplementedError(f"no value of a {schema['type']}: say here what one looks like")


def _text(schema: Schema, length: int) -> str:
    """A text of hexadecimal digits that keeps within the bounds."""
    longest = schema["max_length"]
    return "0" * (longest if "pattern" in schema and longest in (32, 64, 128) else max(length, 2))
