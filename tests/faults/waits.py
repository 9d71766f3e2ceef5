"""Helpers for tests of faults: wait for conditions and read an island's records."""

import time
from collections.abc import Callable
from typing import Any

from tests.swarm import GUARD_SECONDS, Island


def until(is_so: Callable[[], object], what: str, *islands: Island) -> None:
    """Wait until `is_so()` is true. Fails the test with the islands' logs if that does not
    happen.
    """
    deadline = time.monotonic() + GUARD_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            logs = "\n".join(
                f"--- {island.folder.name}\n{island.log[-3000:]}" for island in islands
            )
            raise AssertionError(f"{what} did not happen:\n{logs}")
        time.sleep(0.02)


def last_round(island: Island) -> int:
    """Number of the last round that the island has committed, or -1."""
    return max(island.committed(), default=-1)


def reached(island: Island, round_number: int) -> None:
    """Wait until the island has committed this round or a later one. On a loaded machine it may
    miss some.
    """
    until(lambda: last_round(island) >= round_number, f"round {round_number}", island)


def more_rounds(island: Island, count: int, participants: list[str] | None = None) -> None:
    """Wait until the island has committed `count` more rounds, all with exactly `participants` if
    given.
    """
    after = last_round(island)

    def has_come() -> bool:
        new = [r for number, r in island.committed().items() if number > after]
        return sum(participants is None or r["participants"] == participants for r in new) >= count

    until(has_come, f"{count} more rounds of {participants or 'any'}", island)


def all_records(island: Island, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Records of these kinds in order of time."""
    found = [record for kind in kinds for record in island.records(kind)]
    return sorted(found, key=lambda record: record["time"])


def assert_one_history(*islands: Island) -> None:
    """Check that all islands that committed a round have the same digest for it."""
    rounds = [island.committed() for island in islands]
    for number in set().union(*rounds):
        digests = {found[number]["digest"] for found in rounds if number in found}
        assert len(digests) == 1, f"round {number} has {len(digests)} states"
