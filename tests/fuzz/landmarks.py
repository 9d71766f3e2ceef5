"""Lets libFuzzer see what comes of inputs where it cannot look: pydantic's parser and torch are not Python.

Each new outcome of a decoder calls a function of its own, whose coverage atheris counts. So an input with a new outcome
is kept, and changed further.
"""

from collections.abc import Callable

MOST_OUTCOMES = 20_000


class Landmarks:
    """The outcomes that have been seen so far."""

    def __init__(self, instrument: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """`instrument` makes the coverage of a function count, as atheris.instrument_func."""
        self._instrument = instrument
        self._reached: dict[str, Callable[[], None]] = {}

    def reach(self, outcome: str) -> None:
        """An input has had this outcome."""
        if (mark := self._reached.get(outcome)) is None:
            if len(self._reached) >= MOST_OUTCOMES:
                return

            def reached() -> None:
                pass

            mark = self._reached[outcome] = self._instrument(reached)
        mark()
