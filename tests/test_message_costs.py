"""No message costs an island much, whatever a peer writes into it: the costliest bodies follow from
the schema.
"""

import asyncio
import importlib
import pkgutil
import time
import tracemalloc
import zlib
from contextlib import suppress
from typing import Any

import pytest

import diloco.status
import outer
from outer.errors import MessageError
from outer.limits import MAX_BYTES, UnboundedFieldError, limit_of
from outer.network.messages import LARGE_BYTES, Message, parse, receive
from tests.costly_bodies import Bounds, costly_bodies, every_message

pytest.importorskip("hivemind")

for package in (outer, diloco.status):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

MOST_SECONDS = 0.020
TRIES = 5
"""One of so many tries must be quick: the machine may have other work."""
MOST_MEMORY = 20_000_000
MESSAGES = every_message()
LONG_MESSAGES = [model for model in MESSAGES if limit_of(model).num_bytes > LARGE_BYTES]
NUMBERS = ("int", "float")


def try_to_parse(model: type[Message], body: bytes) -> None:
    with suppress(MessageError):
        parse(model, body)


def seconds_of_loop(model: type[Message], body: bytes) -> float:
    """Time of this thread's processor that the event loop spends on a message."""

    async def timed() -> float:
        began = time.thread_time()
        with suppress(MessageError):
            await receive(model, body)
        return time.thread_time() - began

    return asyncio.run(timed())


def bytes_of(model: type[Message], body: bytes) -> int:
    """The most memory that Python holds for a message while it is parsed, with its bytes."""
    tracemalloc.start()
    try:
        try_to_parse(model, body)
        return len(body) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
def test_the_costliest_bodies_of_every_field_take_the_event_loop_under_20_ms(
    model: type[Message],
) -> None:
    for name, body in costly_bodies(model, LARGE_BYTES):
        is_quick = any(seconds_of_loop(model, body) < MOST_SECONDS for _ in range(TRIES))
        assert is_quick, (name, len(body))


@pytest.mark.parametrize("model", LONG_MESSAGES, ids=lambda model: model.__name__)
def test_the_longest_bodies_take_under_20_mb(model: type[Message]) -> None:
    for name, body in costly_bodies(model, MAX_BYTES, has_inner=False):
        assert bytes_of(model, body) < MOST_MEMORY, (name, len(body))


def test_what_is_large_is_not_parsed_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    monkeypatch.setattr(
        "outer.network.messages._inflate_and_parse", lambda *about: threads.add(time.thread_time())
    )
    model = next(model for model in LONG_MESSAGES if not model.is_parsed_aside)
    began = time.thread_time()
    for body in (bytes(LARGE_BYTES + 1), zlib.compress(bytes(LARGE_BYTES + 1))):
        asyncio.run(receive(model, body))
    assert all(at < began for at in threads) and len(threads) == 2


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
def test_every_field_of_every_message_has_bounds_and_its_longest_body_follows_from_them(
    model: type[Message],
) -> None:
    try:
        limit = limit_of(model)
    except UnboundedFieldError as error:
        pytest.fail(str(error))
    assert len(Bounds(model).smallest(Bounds(model).root)) <= limit.num_bytes


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
def test_no_number_of_a_message_may_be_infinite_no_number_or_beyond_its_bounds(
    model: type[Message],
) -> None:
    bounds = Bounds(model)
    assert parse(model, bounds.smallest(bounds.root))
    for name, place, schema in bounds.places():
        inner = bounds.unwrap(schema)
        for text in wrong_numbers(inner) if inner["type"] in NUMBERS else ():
            with pytest.raises(MessageError):
                parse(model, place(text))
                pytest.fail(f"{model.__name__}.{name} takes {text}")


def wrong_numbers(schema: Any) -> list[str]:
    """Numbers in JSON that a field with these bounds must refuse."""
    lowest: Any = schema.get("ge", schema.get("gt"))
    highest: Any = schema.get("le", schema.get("lt"))
    beyond = [str(lowest - max(1, abs(lowest))), str(highest + max(1, abs(highest)))]
    return [*beyond, "Infinity", "-Infinity", "NaN", "1e999", "-1e999", "9" * 400, '"1"', "true"]
