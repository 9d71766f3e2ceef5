"""Lets libFuzzer see what comes of inputs where it cannot look: pydantic's parser and torch are not
Python.

Each new outcome of a decoder gets a function of its own, whose coverage atheris counts. So an input
with a new outcome is kept, and changed further. The functions are there before the fuzzing begins:
libFuzzer takes new counters from a process some 4,000 times, and then it crashes.
"""

from collections import Counter
from collections.abc import Callable

MOST_OUTCOMES, MOST_OF_ENTRY = 8000, 150
"""Of all decoders of a group, and of one: the texts of errors may name what an input holds."""


class Landmarks:
    """The outcomes that have been seen so far."""

    def __init__(self, instrument: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """`instrument` makes the coverage of a function count, as atheris.instrument_func."""
        self._free = [instrument(_build_mark()) for _ in range(MOST_OUTCOMES)]
        self._reached: dict[tuple[str, str], Callable[[], None]] = {}
        self._num_reached: Counter[str] = Counter()

    def reach(self, entry: str, outcome: str) -> None:
        """An input for this entry has had this outcome."""
        mark = self._reached.get((entry, outcome))
        if mark is None and self._free and self._num_reached[entry] < MOST_OF_ENTRY:
            mark = self._reached[entry, outcome] = self._free.pop()
            self._num_reached[entry] += 1
        if mark is not None:
            mark()


def _build_mark() -> Callable[[], None]:
    def mark() -> None:
        pass

    return mark
