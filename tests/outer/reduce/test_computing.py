"""Where a part is computed."""

import asyncio
import threading

from outer.reduce.computing import SMALL_ELEMENTS, compute


def test_only_work_on_many_values_leaves_the_thread_of_the_event_loop() -> None:
    async def threads_of_work() -> list[int]:
        return [
            await compute(size, threading.get_ident)
            for size in (SMALL_ELEMENTS, SMALL_ELEMENTS + 1)
        ]

    small, large = asyncio.run(threads_of_work())
    assert small == threading.get_ident()
    assert large != threading.get_ident()


def test_peers_are_answered_while_a_long_part_is_computed() -> None:
    answered = threading.Event()

    async def compute_beside_a_peer() -> bool:
        asyncio.get_running_loop().call_soon(answered.set)
        return await compute(SMALL_ELEMENTS + 1, answered.wait, 60)

    assert asyncio.run(compute_beside_a_peer())
