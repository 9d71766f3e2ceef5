"""`python -m tests.outer.without_threads`: two islands, in a process that can make no thread after
the first round.
"""

import os
import resource
import threading

from outer.config import OuterConfig
from tests.outer.islands import GUARD_SECONDS, Island, run_islands

NUM_ROUNDS = 4
STACK_BYTES, SPARE_BYTES = 1 << 30, 1 << 28
"""Room for a round's values is left, and none for the stack of another thread."""


def live(island: Island, together: threading.Barrier) -> list[str]:
    island.outer.begin()
    digests = [_make_round(island)]
    if together.wait(GUARD_SECONDS) == 0:
        _allow_no_more_threads()
    together.wait(GUARD_SECONDS)
    return digests + [_make_round(island) for _ in range(NUM_ROUNDS - 1)]


def _make_round(island: Island) -> str:
    island.train(island.outer.position.round)
    island.outer.launch(100)
    return island.outer.land().reports[-1].digest


def _allow_no_more_threads() -> None:
    threading.stack_size(STACK_BYTES)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))
    try:
        threading.Thread(target=print, daemon=True).start()
    except RuntimeError as error:
        print(error)


def main() -> None:
    config = OuterConfig(start_islands=2, transport="loopback", wait_seconds=GUARD_SECONDS)
    together = threading.Barrier(2)
    found = run_islands({name: lambda island: live(island, together) for name in "ab"}, config)
    assert found["a"] == found["b"]
    print(len(set(found["a"])), "rounds")


if __name__ == "__main__":
    main()
