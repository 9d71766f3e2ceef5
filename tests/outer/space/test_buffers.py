"""Memory that is used again: never while anything still refers to it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outer.space.buffers import Buffers

VIEWS: dict[str, Callable[[torch.Tensor], object]] = {
    "a view": lambda values: values[3:5],
    "a view as bytes": lambda values: values.view(torch.uint8),
    "a numpy array": lambda values: values.numpy(),
    "the bytes of a numpy array": lambda values: values.numpy().data,
}


def test_memory_that_was_dropped_is_used_again() -> None:
    buffers = Buffers()
    first = buffers.floats(1000)
    address = first.data_ptr()
    del first
    assert buffers.bytes(4000).data_ptr() == address


@pytest.mark.parametrize("kind", VIEWS)
def test_memory_that_something_refers_to_is_not_used_again(kind: str) -> None:
    buffers = Buffers()
    values = buffers.floats(1000)
    address, kept = values.data_ptr(), VIEWS[kind](values)
    del values
    assert buffers.floats(1000).data_ptr() != address
    del kept
    assert buffers.floats(1000).data_ptr() == address


def test_another_size_gets_other_memory() -> None:
    buffers = Buffers()
    address = buffers.floats(1000).data_ptr()
    assert buffers.floats(1001).data_ptr() != address


def test_nothing_is_a_size() -> None:
    assert Buffers().floats(0).shape == Buffers().bytes(0).shape == (0,)


def test_threads_never_hold_the_same_memory() -> None:
    buffers = Buffers()

    def hold(number: int) -> bool:
        held = [buffers.floats(64).fill_(number) for _ in range(20)]
        return all(bool((values == number).all()) for values in held)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(hold, range(100)))
