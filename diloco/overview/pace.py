"""Measure the pace of an island: seconds and bytes of its last committed rounds, to compare with
the prediction.
"""

from collections import deque

from diloco.records.figures import ENDS, IslandFigures
from diloco.records.metrics import EventRecord

WINDOW = 20
"""Number of rounds over which the pace is a mean."""
STARTS = ("joined", "resumed")


class RecordedPace:
    """Computes the pace from an island's records in their order. Rounds before and after a restart
    are kept apart.
    """

    def __init__(self) -> None:
        self._commits: deque[IslandFigures] = deque(maxlen=WINDOW + 1)
        self.now: list[float | None] | None = None
        """The last row; None before the second commit since a start."""

    def add_event(self, record: EventRecord) -> None:
        """Start again if the event says that the island ended or started."""
        if record.name in (*ENDS, *STARTS):
            self._commits.clear()
            self.now = None

    def add_commit(self, figures: IslandFigures) -> list[float | None] | None:
        """Return the pace after a commit, as a row of IslandHistory; None after the first commit.

        `figures`: the island's after the commit. Aborted attempts count in the seconds and bytes of
        the round that is committed next.
        """
        if self._commits and figures.round <= self._commits[-1].round:
            self._commits.clear()  # The island has taken another history of the run.
        self._commits.append(figures)
        self.now = row_between(self._commits[0], figures) or self.now
        return row_between(self._commits[0], figures)


def row_between(then: IslandFigures, now: IslandFigures) -> list[float | None] | None:
    """Return time, seconds per round, their share in inner steps, bytes per round, bits per second;
    None without a round.
    """
    rounds = now.round - then.round
    seconds = (now.last_record or 0.0) - (then.last_record or 0.0)
    sent = now.bytes_sent - then.bytes_sent
    if rounds < 1 or seconds <= 0:
        return None
    reduced = now.reduce_seconds - then.reduce_seconds
    share = min((now.step_seconds - then.step_seconds) / seconds, 1.0)
    return [
        now.last_record,
        seconds / rounds,
        share,
        sent / rounds,
        8 * sent / reduced if reduced > 0 else None,
    ]
