"""How an island spent its time, by its records: the same shares for the page, the report and
`diloco status`.
"""

from collections import deque

from diloco.records.figures import finite
from diloco.records.metrics import EvalRecord, PauseRecord, Record, RoundRecord, StepRecord

ACTIVITIES = (
    "computing",
    "reading text",
    "network",
    "waiting",
    "evaluating",
    "saving",
    "away",
    "other",
)
"""In inner steps, waiting for text, in the reduces of attempts, waiting for other islands before
them, in evaluations, copying the state for a checkpoint, without processes, and the rest: setting
up, connecting, catching up.
"""
LATEST = 4096
"""Number of the latest stretches of training that may lie within the time of a round."""
Stretch = tuple[float, float]


class ActivityTimes:
    """Adds up the seconds of an island by activity.

    Times in which rounds and inner steps overlap count as computing.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(ACTIVITIES, 0.0)
        self.first: float | None = None
        """Unix time at which the first recorded activity began."""
        self.last = 0.0
        """Unix time of the last record."""
        self._training: deque[Stretch] = deque(maxlen=LATEST)

    def add(self, record: Record) -> None:
        """Add the seconds of a record."""
        begin = record.time
        match record:
            case StepRecord():
                begin = self._add_training(record)
            case RoundRecord():
                begin = self._add_round(record)
            case EvalRecord():
                begin -= self._add("evaluating", record.seconds)
            case PauseRecord():
                begin -= self._add("saving", record.seconds)
            case _:
                pass
        self.first = begin if self.first is None else min(self.first, begin)
        self.last = max(self.last, record.time)

    def find_seconds(self, away: float, until: float | None = None) -> dict[str, float]:
        """Return the seconds of each activity from the first record until a time, by default the
        last record.

        `away`: seconds in which the island had no processes.
        """
        whole = 0.0 if self.first is None else max((until or self.last) - self.first, 0.0)
        seconds = {name: self.seconds[name] for name in ACTIVITIES} | {"away": away}
        return seconds | {"other": max(whole - sum(seconds.values()), 0.0)}

    def _add(self, name: str, seconds: float | None) -> float:
        value = finite(seconds) or 0.0
        self.seconds[name] += value
        return value

    def _add_training(self, record: StepRecord) -> float:
        computing = self._add("computing", record.seconds)
        begin = record.time - computing - self._add("reading text", record.data_seconds)
        self._training.append((begin, record.time))
        return begin

    def _add_round(self, record: RoundRecord) -> float:
        reduce_begin = record.time - (finite(record.reduce_seconds) or 0.0)
        wait_begin = reduce_begin - (finite(record.wait_seconds) or 0.0)
        self._add("waiting", self._without_training(wait_begin, reduce_begin))
        self._add("network", self._without_training(reduce_begin, record.time))
        return wait_begin

    def _without_training(self, begin: float, end: float) -> float:
        """Return the seconds between two times in which the island made no inner step."""
        seconds = end - begin
        for start, stop in reversed(self._training):
            if stop <= begin:
                break
            seconds -= max(min(stop, end) - max(start, begin), 0.0)
        return max(seconds, 0.0)


def find_shares(islands: list[dict[str, float]]) -> dict[str, float]:
    """Return the share of each activity in the time of all islands together; empty without a
    record.
    """
    sums = {name: sum(seconds[name] for seconds in islands) for name in ACTIVITIES}
    whole = sum(sums.values())
    return {name: sums[name] / whole for name in ACTIVITIES} if whole else {}
