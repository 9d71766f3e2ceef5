"""Runs of units: evenly spaced numbers, kept as Python's `range`; in JSON [first, count, stride].

1, 4, 7, 10 is range(1, 13, 3) and [1, 4, 3]: what the second of three islands reads in its first four inner steps.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

MAX_UNIT = 1 << 60


def _to_range(value: object) -> range:
    if isinstance(value, range):
        return value
    if not isinstance(value, list | tuple) or len(value) != 3 or any(type(number) is not int for number in value):
        raise ValueError("a run of units is [first, count, stride]")
    first, count, stride = value
    if first < 0 or count < 1 or stride < 1 or count * stride > MAX_UNIT or first > MAX_UNIT:
        raise ValueError(f"a run of units is [first >= 0, count >= 1, stride >= 1], not {value}")
    return range(first, first + count * stride, stride)


def triple(run: range) -> list[int]:
    """[first, count, stride]"""
    return [run.start, len(run), run.step]


Run = Annotated[range, PlainValidator(_to_range), PlainSerializer(triple, return_type=list[int])]
Runs = tuple[Run, ...]
"""Units in the order in which they are read; no run is empty."""


def count(runs: Runs) -> int:
    """Units in all runs."""
    return sum(len(run) for run in runs)


def head(runs: Runs, number: int) -> Runs:
    """The first `number` units, or all that there are."""
    kept: list[range] = []
    for run in runs:
        kept.append(run[:number])
        number -= len(kept[-1])
    return tuple(run for run in kept if run)


def tail(runs: Runs, number: int) -> Runs:
    """What `head` leaves."""
    kept: list[range] = []
    for run in runs:
        kept.append(run[number:])
        number = max(number - len(run), 0)
    return tuple(run for run in kept if run)


def append(runs: Runs, run: range) -> Runs:
    """The run at the end; one with the last, when it goes on as that does."""
    if runs and runs[-1].step == run.step and runs[-1][-1] + run.step == run[0]:
        return (*runs[:-1], range(runs[-1].start, run[-1] + run.step, run.step))
    return (*runs, run)


def deal(pool: list[range], frontier: int, needs: Mapping[str, int]) -> tuple[dict[str, Runs], list[range], int]:
    """(what each gets, the pool left, the frontier then): units of the pool in order, then from `frontier` on.

    One to each in turn, as long as it needs some: those with equal needs get every n-th unit.
    """
    given: dict[str, Runs] = dict.fromkeys(needs, ())
    left, pool = {name: need for name, need in needs.items() if need > 0}, list(pool)
    while left:
        least, turns = min(left.values()), len(left)
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
