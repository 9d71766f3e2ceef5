"""Where a part is encoded, merged or decoded: in a thread, or at once if handing it over would take longer."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SMALL_ELEMENTS = 1 << 14
"""Values up to which work is done at once. It then holds the event loop for some 0.1 ms, which is about what a thread
takes to be woken and to get the interpreter; with 64 islands in one process parts this small are most of a round."""


async def compute(num_elements: int, work: Callable[..., T], *args: Any) -> T:
    """`work(*args)`, which reads `num_elements` values in all: in a thread, so that peers are answered meanwhile."""
    if num_elements <= SMALL_ELEMENTS:
        return work(*args)
    return await asyncio.to_thread(work, *args)
