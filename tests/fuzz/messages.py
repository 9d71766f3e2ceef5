"""Every kind of message, found among the subclasses of Message."""

import importlib
import pkgutil
from collections.abc import Iterator
from functools import partial

import diloco.status
import outer
from outer.network.messages import LARGE_BYTES, Message, deflate, is_inflated_large, parse, receive
from tests.costly_bodies import Bounds, every_message
from tests.fuzz.entries import EVENT_LOOP_SECONDS, Entries, Entry
from tests.fuzz.loop import LOOP, finish

ASIDE_SECONDS = 0.5
"""Most time of a message that is parsed off the event loop: it may have megabytes once it is
inflated.
"""
MOST_SEED_BYTES = 3000


def build_messages() -> Entries:
    """An entry for each kind of message."""
    for package in (outer, diloco.status):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    return {name_of(model): _build_entry(model) for model in every_message()}


def name_of(model: type[Message]) -> str:
    """The name of a kind of message: several modules have a Proof, a Challenge and a Statement."""
    return f"{model.__module__}.{model.__name__}"


def _build_entry(model: type[Message]) -> Entry:
    seconds = ASIDE_SECONDS if model.is_parsed_aside else EVENT_LOOP_SECONDS
    return Entry(partial(_decode, model), list(_seeds(model)), is_json=True, most_seconds=seconds)


def _seeds(model: type[Message]) -> Iterator[bytes]:
    """Small valid messages: the smallest one, as it is and compressed, and one for each field with
    a longer value.
    """
    bounds = Bounds(model)
    smallest = bounds.smallest(bounds.root).encode()
    yield smallest
    yield parse(model, smallest).encode()
    yield deflate(smallest + b" " * 5000)
    for _, place, schema in bounds.places():
        item = bounds.item_of(schema)
        text = (
            bounds.longest(schema)
            if item is None
            else f"[{bounds.smallest(item)},{bounds.smallest(item)}]"
        )
        if (entry := bounds.entry_of(schema)) is not None:
            text = f'{{"a":{bounds.smallest(entry)}}}'
        if len(body := place(text).encode()) < MOST_SEED_BYTES:
            yield body


def _decode(model: type[Message], body: bytes) -> None:
    message = take(model, body)
    assert type(message) is model
    again = parse(model, message.encode())
    assert again == message, "a message is another one once it has been sent on"


def take(model: type[Message], body: bytes) -> Message:
    """What an island does with a message that arrives. Raises MessageError."""
    if model.is_parsed_aside or len(body) > LARGE_BYTES or is_inflated_large(body):
        return LOOP.run_until_complete(receive(model, body))
    return finish(receive(model, body))
