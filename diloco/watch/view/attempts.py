"""Combine the records of all islands into attempts at rounds and times of ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from diloco.formatting import human_seconds
from diloco.watch.view.history import IslandHistory, Row
from diloco.watch.view.run_view import RunView

STOPPED = "with its process stopped"
LATE_SECONDS = 0.05
SLOW_SHARE = 0.1
"""A wait shorter than this time, or than this share of the steps' time, names no straggler."""


@dataclass
class Attempt:
    """One attempt at a round. `rows`: the row of kind `rounds` of each island."""

    round: int
    attempt: int
    time: float = 0.0
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def digests(self) -> set[str]:
        """Digests of the states that islands committed. More than one means that something is
        wrong.
        """
        return {row[10] for row in self.rows.values() if row[3]}

    @property
    def cause(self) -> str:
        """Why the attempt was aborted, or a remark about its commit; empty if there is neither."""
        return next((row[11] for row in self.rows.values() if row[11]), "")

    @property
    def notes(self) -> list[str]:
        """Number of signatures of the state, audits, left-out parts, norm of the mean, and cosines
        with the mean.
        """
        rows = self.rows.values()
        left_out = dict[str, int]()
        for row in rows:
            for name, count in row[18].items():
                left_out[name] = left_out.get(name, 0) + count
        signers, audited = (max(row[place] for row in rows) for place in (16, 17))
        norms, cosines = (
            [row[place] for row in rows if row[place] is not None] for place in (14, 15)
        )
        return [
            *([f"signed by {signers}"] if signers else []),
            *([f"{audited} parts audited"] if audited else []),
            *(f"{count} parts of {name} left out" for name, count in left_out.items()),
            *([f"mean's norm {norms[0]:.3g}"] if norms else []),
            *([f"cosines {min(cosines):.2f} to {max(cosines):.2f}"] if cosines else []),
        ]

    @property
    def last_to_come(self) -> str:
        """The island that waited least, with the time that the others waited for it; empty if that
        is short.
        """
        waits = sorted((row[4], name) for name, row in self.rows.items())
        late = waits[-1][0] - waits[0][0]
        return f"{waits[0][1]} ({human_seconds(late)})" if late > LATE_SECONDS else ""


def find_attempts(view: RunView, most: int) -> list[Attempt]:
    """Return the newest attempts, at most `most`, the newest last."""
    found: dict[tuple[int, int], Attempt] = {}
    for name, island in view.islands.items():
        for row in island.rows["rounds"][-2 * most :]:
            attempt = found.setdefault((row[1], row[2]), Attempt(row[1], row[2]))
            attempt.rows[name] = row
            attempt.time = max(attempt.time, row[0])
    return sorted(found.values(), key=lambda attempt: attempt.time)[-most:]


def find_stragglers(islands: Mapping[str, IslandHistory]) -> Iterator[str]:
    """Yield a line for each island whose ranks waited for one rank in the last round, with what
    that rank did.
    """
    for name, island in islands.items():
        if not island.rows["ranks"]:
            continue
        ranks = sorted(island.rows["ranks"][-1][2], key=waited)
        least = ranks[0]
        behind = waited(ranks[-1]) - waited(ranks[0])
        if behind > max(LATE_SECONDS, SLOW_SHARE * least[1]):
            # Older records do not have the last one.
            did = zip(
                ("reading text", "computing", "without a processor", "between steps", STOPPED),
                least[2:],
                strict=False,
            )
            told = ", ".join(
                f"{human_seconds(seconds)} {what}"
                for what, seconds in did
                if seconds or what != STOPPED
            )
            yield (
                f"{name}: the others waited {human_seconds(behind)} for rank {least[0]:.0f} "
                f"({told})"
            )


def waited(rank: Row) -> float:
    """Return the seconds that a rank waited in steps, without those in which others may have waited
    for it.
    """
    return rank[1] - sum(rank[2:])
