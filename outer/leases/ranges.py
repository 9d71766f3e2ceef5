"""Ranges of data units: evenly spaced numbers, kept as Python's `range` and sent in JSON as [first,
count, stride].

The units 1, 4, 7, 10, which the second of three islands reads first, are range(1, 13, 3), in JSON
[1, 4, 3].
"""

from collections.abc import Mapping
from itertools import islice
from typing import Annotated

from pydantic import Field, PlainSerializer, PlainValidator

MAX_UNIT = 1 << 60


def _to_range(value: object) -> range:
    if isinstance(value, range):
        return value
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or any(type(number) is not int for number in value)
    ):
        raise ValueError("a range of units is [first, count, stride]")
    first, count, stride = value
    if first < 0 or count < 1 or stride < 1 or count * stride > MAX_UNIT or first > MAX_UNIT:
        raise ValueError(f"a range of units is [first >= 0, count >= 1, stride >= 1], not {value}")
    return range(first, first + count * stride, stride)


def triple(units: range) -> list[int]:
    """Return the range as [first, count, stride]."""
    return [units.start, len(units), units.step]


_First = Annotated[int, Field(ge=0, le=MAX_UNIT)]
_Count = Annotated[int, Field(ge=1, le=MAX_UNIT)]
_Triple = tuple[_First, _Count, _Count]
UnitRange = Annotated[
    range,
    PlainValidator(_to_range, json_schema_input_type=_Triple),
    PlainSerializer(triple, return_type=list[int]),
]
Ranges = tuple[UnitRange, ...]
"""Units in the order in which they are read. No range is empty."""


def count(ranges: Ranges) -> int:
    return sum(len(units) for units in ranges)


def head(ranges: Ranges, number: int) -> Ranges:
    """Return the first `number` units, or all of them if there are fewer."""
    kept: list[range] = []
    for units in ranges:
        kept.append(units[:number])
        number -= len(kept[-1])
    return tuple(units for units in kept if units)


def tail(ranges: Ranges, number: int) -> Ranges:
    """Return all units except the first `number`."""
    kept: list[range] = []
    for units in ranges:
        kept.append(units[number:])
        number = max(number - len(units), 0)
    return tuple(units for units in kept if units)


def append(ranges: Ranges, units: range) -> Ranges:
    """Append a range. It is merged with the last range if it continues it."""
    if ranges and ranges[-1].step == units.step and ranges[-1][-1] + units.step == units[0]:
        return (*ranges[:-1], range(ranges[-1].start, units[-1] + units.step, units.step))
    return (*ranges, units)


def deal(
    pool: list[range], frontier: int, needs: Mapping[str, int]
) -> tuple[dict[str, Ranges], list[range], int]:
    """Deal units out, first those of the pool in order and then those from `frontier` on.

    Every taker gets one unit in turn while it needs more, so n takers with equal needs each get
    every n-th unit. Returns (ranges by taker, remaining pool, new frontier).

    >>> given, pool, frontier = deal([range(4, 5)], 10, {"a": 3, "b": 2})
    >>> {name: [triple(units) for units in each] for name, each in given.items()}, pool, frontier
    ({'a': [[4, 1, 2], [10, 2, 2]], 'b': [[11, 2, 2]]}, [], 14)
    """
    given: dict[str, Ranges] = dict.fromkeys(needs, ())
    left = {name: need for name, need in needs.items() if need > 0}
    pool = list(pool)
    while left:
        least = min(left.values())
        turns = len(left)
        source = pool.pop(0) if pool else range(frontier, frontier + least * turns)
        number = min(len(source), least * turns)
        for place, name in enumerate(islice(list(left), number)):
            share = source[:number][place::turns]
            given[name] = append(given[name], share)
            left[name] -= len(share)
        if rest := source[number:]:
            pool.insert(0, rest)
        frontier = max(frontier, source[number - 1] + 1)
        left = {name: need for name, need in left.items() if need > 0}
    return given, pool, frontier
