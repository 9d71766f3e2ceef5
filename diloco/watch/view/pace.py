"""Measure the pace of an island: seconds and bytes of its last committed rounds, to compare with
the prediction.
"""

from collections import deque
from dataclasses import dataclass

from diloco.records.figures import ENDS, IslandFigures
from diloco.records.metrics import EventRecord, RoundRecord

WINDOW = 20
"""Number of rounds over which the pace is a mean."""
STARTS = ("joined", "resumed")


@dataclass(frozen=True)
class Mark:
    """The figures of an island at the commit of a round."""

    time: float
    round: int
    figures: IslandFigures


class Pace:
    """Computes the pace from an island's records in their order. Rounds before and after a restart
    are kept apart.
    """

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque(maxlen=WINDOW + 1)

    def add_event(self, record: EventRecord) -> None:
        """Start again if the event says that the island ended or started."""
        if record.name in (*ENDS, *STARTS):
            self._marks.clear()

    def add_round(self, record: RoundRecord, figures: IslandFigures) -> list[float | None] | None:
        """Return the pace after an attempt, as a row of IslandHistory; None for an aborted attempt
        or the first commit. `figures`: the island's, after the attempt.

        Aborted attempts count in the seconds and bytes of the round that is committed next.
        """
        if not record.committed:
            return None
        now = Mark(record.time, record.round, figures)
        if self._marks and now.round <= self._marks[-1].round:
            self._marks.clear()  # The island has taken another history of the run.
        self._marks.append(now)
        return row_between(self._marks[0], now)


def row_between(then: Mark, now: Mark) -> list[float | None] | None:
    """Return time, seconds per round, their share in inner steps, bytes per round, bits per second;
    None without a round.
    """
    rounds = now.round - then.round
    seconds = now.time - then.time
    sent = now.figures.bytes_sent - then.figures.bytes_sent
    if rounds < 1 or seconds <= 0:
        return None
    reduced = now.figures.reduce_seconds - then.figures.reduce_seconds
    share = min((now.figures.step_seconds - then.figures.step_seconds) / seconds, 1.0)
    return [now.time, seconds / rounds, share, sent / rounds, 8 * sent / reduced if reduced > 0 else None]
