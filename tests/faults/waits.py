"""What tests of faults wait for, and how they read an island's records."""

import time
from collections.abc import Callable
from typing import Any

from tests.swarm import Island

GUARD_SECONDS = 150.0


def until(is_so: Callable[[], object], what: str, *islands: Island) -> None:
    """Return when it is so; fails with the logs when that does not come."""
    deadline = time.monotonic() + GUARD_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            logs = "\n".join(f"--- {island.folder.name}\n{island.log[-3000:]}" for island in islands)
            raise AssertionError(f"{what} did not happen:\n{logs}")
        time.sleep(0.02)


def last_round(island: Island) -> int:
    """The last round that it has committed; -1: none."""
    return max(island.committed(), default=-1)


def reached(island: Island, round_number: int) -> None:
    """Wait until it has committed this round or a later one: on a loaded machine it may miss some."""
    until(lambda: last_round(island) >= round_number, f"round {round_number}", island)


def more_rounds(island: Island, count: int, participants: list[str] | None = None) -> None:
    """Wait until it has committed so many more rounds; with `participants`, rounds of exactly these."""
    after = last_round(island)

    def has_come() -> bool:
        new = [r for number, r in island.committed().items() if number > after]
        return sum(participants is None or r["participants"] == participants for r in new) >= count

    until(has_come, f"{count} more rounds of {participants or 'any'}", island)


def all_records(island: Island, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Its records of these kinds, in their order."""
    found = [record for kind in kinds for record in island.records(kind)]
    return sorted(found, key=lambda record: record["time"])


def assert_one_history(*islands: Island) -> None:
    """Every round was committed with one digest by all islands that committed it."""
    rounds = [island.committed() for island in islands]
    for number in set().union(*rounds):
        digests = {found[number]["digest"] for found in rounds if number in found}
        assert len(digests) == 1, f"round {number} has {len(digests)} states"
