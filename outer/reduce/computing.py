"""Computation on parts: in a thread, or directly if handing it to a thread would take longer."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SMALL_ELEMENTS = 1 << 14
"""Up to this number of values, work is done directly. It then blocks the event loop for about
0.1 ms, which is about the time to wake a thread that gets the interpreter. With 64 islands in
one process, such small parts are most of a round."""


async def compute(num_elements: int, work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, which reads `num_elements` values in total. It runs in a thread if
    it is long, so that peers are still answered.
    """
    if num_elements <= SMALL_ELEMENTS:
        return work(*args)
    return await asyncio.to_thread(work, *args)
