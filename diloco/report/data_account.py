"""What a run's records say of the text that was read: was every unit trained once? No torch here."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from diloco.metrics import RoundRecord
from diloco.runfiles import IslandRecords


def data_account(islands: Sequence[IslandRecords]) -> dict[str, Any]:
    """Units trained in committed rounds, trained more than once, and open at the end; None when not recorded.

    `steps_accounted`: inner steps of those rounds, by the records; each trains one unit. Records of an island that was
    killed between a commit and its record are missing.
    """
    committed = [record for island in islands for record in once_each(island.rounds)]
    if not committed:
        return dict.fromkeys(("units_trained", "units_repeated", "units_open", "steps_accounted"))
    last = max(committed, key=lambda r: (r.trained_units, r.round))
    survived = history(committed, last)
    units = list(chain.from_iterable(map(units_of, survived)))
    return {
        "units_trained": last.trained_units,
        "units_repeated": len(units) - len(set(units)),
        "units_open": last.open_units,
        "steps_accounted": sum(record.steps for record in survived),
    }


def once_each(rounds: Sequence[RoundRecord]) -> list[RoundRecord]:
    """The committed rounds of one island: one that it made again, after a stop, has the same digest and counts once."""
    return list({r.digest: r for r in rounds if r.committed and r.base}.values())


def history(committed: Sequence[RoundRecord], last: RoundRecord) -> list[RoundRecord]:
    """The records of the commits that led to the last one: not those of a parted network's other side."""
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
    """The units that the island's progress had read."""
    runs = (range(first, first + count * stride, stride) for first, count, stride in record.units)
    return list(chain.from_iterable(runs))
