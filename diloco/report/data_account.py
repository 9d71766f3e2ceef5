"""Accounts for the text that a run has read: was every unit trained exactly once?

Importing this module does not import torch.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from diloco.records.metrics import RoundRecord
from diloco.records.run_folder import IslandRecords


def data_account(islands: Sequence[IslandRecords]) -> dict[str, Any]:
    """Count the units trained in committed rounds, trained more than once, and open at the end.

    `steps_accounted` counts the inner steps of those rounds, each of which trains one unit. Figures
    that were not recorded are None. An island that is killed between a commit and its record leaves
    a gap.
    """
    committed = [record for island in islands for record in distinct_commits(island.rounds)]
    if not committed:
        return dict.fromkeys(("units_trained", "units_repeated", "units_open", "steps_accounted"))
    last = max(committed, key=lambda r: (r.trained_units, r.round))
    survived = surviving_history(committed, last)
    units = list(chain.from_iterable(map(units_of, survived)))
    return {
        "units_trained": last.trained_units,
        "units_repeated": len(units) - len(set(units)),
        "units_open": last.open_units,
        "steps_accounted": sum(record.steps for record in survived),
    }


def distinct_commits(rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
    """Return the committed rounds of one island.

    A round repeated after a stop counts once, by its digest.
    """
    return list({r.digest: r for r in rounds if r.committed and r.base}.values())


def surviving_history(committed: Sequence[RoundRecord], last: RoundRecord) -> list[RoundRecord]:
    """Return the records of the commits that led to the last one.

    Commits on the other side of a partitioned network are left out.
    """
    by_digest: dict[str, list[RoundRecord]] = {}
    for record in committed:
        by_digest.setdefault(record.digest, []).append(record)
    found: list[RoundRecord] = []
    digest = last.digest
    while records := by_digest.pop(digest, None):
        found += records
        digest = records[0].base
    return found


def units_of(record: RoundRecord) -> list[int]:
    """Return the numbers of the data units that the island's contribution to the round trained."""
    ranges = (range(first, first + count * stride, stride) for first, count, stride in record.units)
    return list(chain.from_iterable(ranges))
