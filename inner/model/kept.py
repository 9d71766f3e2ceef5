"""Values that a repeated forward takes from the first one instead of computing them again.

With recomputation, the backward of a block repeats its forward. Decisions, such as a router's, must
be the same both times, and what is counted must be counted once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor


class KeptValues:
    """The kept values of one forward, in the order in which it computed them."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._num_taken: int | None = None
        """Number of values that the repetition has taken; None in the first forward."""

    @property
    def is_repetition(self) -> bool:
        return self._num_taken is not None

    def next(self, compute: Callable[[], Tensor]) -> Tensor:
        if self._num_taken is None:
            self._values.append(compute())
            return self._values[-1]
        self._num_taken += 1
        return self._values[self._num_taken - 1]

    @contextmanager
    def first(self) -> Iterator[None]:
        """Keep the values of the forward inside the block."""
        with _within(self):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give the forward inside the block the values of the first one."""
        self._num_taken = 0
        with _within(self):
            yield


_current: ContextVar[KeptValues | None] = ContextVar("kept_values", default=None)


@contextmanager
def _within(values: KeptValues) -> Iterator[None]:
    token = _current.set(values)
    try:
        yield
    finally:
        _current.reset(token)


def keep(compute: Callable[[], Tensor]) -> Tensor:
    """Return the computed value; in a repeated forward, the value that the first one computed."""
    values = _current.get()
    return compute() if values is None else values.next(compute)


def is_repetition() -> bool:
    """Return whether this forward repeats an earlier one for its backward."""
    values = _current.get()
    return values is not None and values.is_repetition
