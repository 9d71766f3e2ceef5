"""Makes new inputs of a group out of those that it has: within the bytes, within JSON, and within
what is compressed.

libFuzzer changes bytes. Most changes of a message end at its first brace, so JSON is also changed
value by value.
"""

import json
import random
import zlib
from collections.abc import Callable
from typing import Any

from outer.network.messages import ZLIB
from tests.foreign.mutations import DEEP, ODD
from tests.fuzz.entries import Entries, Entry, join, split

Mutate = Callable[[bytes, int], bytes]
"""libFuzzer's own change of bytes, given the most that there may be."""
MOST_INFLATED = 1 << 16
OTHER_ENTRY, AS_BYTES, DAMAGED = 0.02, 0.3, 0.1
"""How often another entry takes its turn, JSON is changed as bytes, and what is compressed is
changed as it is.
"""


class Mutator:
    """The changes of the inputs of one group."""

    def __init__(self, entries: Entries, mutate: Mutate) -> None:
        self._entries, self._mutate = entries, mutate
        self._names = sorted(entries)

    def __call__(self, data: bytes, max_size: int, seed: int) -> bytes:
        """An input that differs from this one."""
        draw = random.Random(seed)
        name, body = split(self._entries, data)
        if draw.random() < OTHER_ENTRY:
            name = draw.choice(self._names)
            body = draw.choice(self._entries[name].seeds)
        most = max_size - len(name) - 1
        return join(name, self._change(self._entries[name], body, most, draw)[: max(most, 0)])

    def _change(self, entry: Entry, body: bytes, most: int, draw: random.Random) -> bytes:
        is_opened = body[:1] == ZLIB and draw.random() > DAMAGED
        if entry.is_json and is_opened and (plain := _inflate(body)) is not None:
            return zlib.compress(self._change(entry, plain, MOST_INFLATED, draw), 1)
        if entry.is_json and draw.random() > AS_BYTES:
            try:
                return self._change_json(body, draw)
            except (ValueError, RecursionError):
                pass
        return self._mutate(body, max(most, 1))

    def _change_json(self, body: bytes, draw: random.Random) -> bytes:
        value = json.loads(body)
        places = list(_places(value))
        for _ in range(draw.choice((1, 1, 2))):
            value = self._changed(value, draw.choice(places), places, draw)
        text = json.dumps(value, separators=(",", ":"))
        return text.replace(json.dumps(DEEP), "[" * 5000 + "]" * 5000).encode()

    def _changed(
        self, value: Any, path: tuple[Any, ...], places: list[tuple[Any, ...]], draw: random.Random
    ) -> Any:
        """The value with what lies at the path changed, left out or repeated. It is changed in
        place.
        """
        if not path:
            return self._value(value, draw)
        holder = _at(value, path[:-1])
        if not _holds(holder, path[-1]):  # An earlier change has taken it away.
            return value
        match draw.randrange(6):
            case 0:
                del holder[path[-1]]
            case 1 if isinstance(holder, list):
                holder.insert(draw.randint(0, len(holder)), holder[path[-1]])
            case 1:
                holder["unknown"] = 0
            case 2:
                holder[path[-1]] = json.loads(json.dumps(_at(value, draw.choice(places))))
            case _:
                holder[path[-1]] = self._value(holder[path[-1]], draw)
        return value

    def _value(self, value: Any, draw: random.Random) -> Any:
        """Another value in the place of this one."""
        if draw.random() < 0.3:
            return draw.choice(ODD)
        if isinstance(value, str) and value:
            return self._mutate(value.encode("utf-8", "replace"), 2 * len(value) + 8).decode(
                "utf-8", "replace"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            return draw.choice(ODD)
        return draw.choice(
            (value + 1, value - 1, -value, 2 * value, value + (1 << draw.randrange(64)), str(value))
        )


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """The paths to a value and to all values within it."""
    yield path
    within = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in within:
        yield from _places(each, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    """What lies at the path, or None if it is not there any more."""
    for key in path:
        if not _holds(value, key):
            return None
        value = value[key]
    return value


def _holds(holder: Any, key: Any) -> bool:
    if isinstance(holder, dict):
        return key in holder
    return isinstance(holder, list) and isinstance(key, int) and key < len(holder)


def _inflate(body: bytes) -> bytes | None:
    try:
        return zlib.decompressobj().decompress(body, MOST_INFLATED)
    except zlib.error:
        return None
