"""An account of a run, kept up to date record by record: times, absences, incidents, commits.

`diloco watch` feeds it while a run goes on; the report and `diloco status` feed it a run's folder.
"""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from diloco.overview.activities import ActivityTimes
from diloco.overview.incidents import (
    DIED,
    DISAGREEMENT,
    JOINED,
    Incident,
    find_of_event,
    find_of_round,
    is_end_of_run,
)
from diloco.overview.pace import RecordedPace
from diloco.records.figures import ENDS, LatestRecords, finite
from diloco.records.metrics import (
    STARTED_AGAIN,
    EvalRecord,
    EventRecord,
    Record,
    RoundRecord,
    StepRecord,
)

MAX_WAITS = 256
"""Number of an island's newest commits that tell for whom islands wait."""
MAX_INCIDENTS = 5000
"""Most incidents that are kept; later ones of a run that has more are only counted in the
figures.
"""
SETTLED_SECONDS = 60.0
"""Time after which no record of a commit before it is expected any more."""
UNNOTED = "its processes ended without a record: they were killed, or the machine was lost"
ENTRY = re.compile(r"round (\d+),")
STAGE = re.compile(r"(\d{1,9})( of \d{1,9})?$")
Attempt = tuple[int, int, tuple[str, ...]]
"""Round, attempt and participants. Islands outside a plan may number their own attempt the same."""


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A time in which an island had no processes, or was entering the run again."""

    begin: float
    end: float | None
    """None while it lasts."""
    cause: str
    is_failure: bool
    """False if the island was asked to leave, or the run was over."""


class IslandAccount:
    """The account of one island."""

    def __init__(self, name: str, run: "RunAccount") -> None:
        self.name = name
        self.latest = LatestRecords(name)
        self.times = ActivityTimes()
        self.pace = RecordedPace()
        self.waits: deque[tuple[Attempt, float]] = deque(maxlen=MAX_WAITS)
        """Its newest commits, and the seconds that it waited for the others in each."""
        self.num_steps = 0
        self.absences: list[Absence] = []
        self.entry_round: int | None = None
        """Committed rounds of the run when the island first joined; None before."""
        self.entry_time = math.inf
        self.is_over = False
        """Whether the island has left because the run is over."""
        self.is_waiting = False
        """Whether its last record says that it waits for other islands."""
        self._run = run
        self._last_event = ""
        self._unnoted: Incident | None = None
        """The newest end without a record, which a record of the next life may explain."""

    def write(self, record: Record) -> list[float | None] | None:
        """Add the next record of the island. Return the pace after a commit, as a row of
        RecordedPace.
        """
        before = self.latest.figures.last_record
        self.latest.write(record)
        self.times.add(record)
        self.is_waiting = isinstance(record, EventRecord) and record.name == "waiting"
        match record:
            case StepRecord():
                self.num_steps += 1
            case RoundRecord():
                self._run.add_round(self.name, record)
                if record.committed:
                    attempt = (record.round, record.attempt, record.participants)
                    self.waits.append((attempt, finite(record.wait_seconds) or 0.0))
                    return self.pace.add_commit(self.latest.figures)
            case EvalRecord():
                self._run.add_eval(record)
            case EventRecord():
                self.pace.add_event(record)
                self._add_event(record, before)
            case _:
                pass
        return None

    @property
    def is_away(self) -> bool:
        """Whether the island has ended and not come back."""
        return bool(self.absences) and self.absences[-1].end is None

    def seconds(self, until: float | None = None) -> dict[str, float]:
        """Return its seconds by activity until a time, by default its last record."""
        end = until or self.times.last
        away = sum((end if each.end is None else each.end) - each.begin for each in self.absences)
        return self.times.find_seconds(max(away, 0.0), end)

    def was_present(self, time: float) -> bool:
        """Return whether the island had joined and was not away at a unix time."""
        if not self.entry_time <= time <= self.times.last:
            return False
        return not any(
            each.begin <= time and (each.end is None or time < each.end) for each in self.absences
        )

    def _add_event(self, record: EventRecord, before: float | None) -> None:
        if incident := find_of_event(self.name, record):
            self._run.add_incident(
                incident, replaces=self._unnoted if record.name == DIED else None
            )
        if record.name in ENDS:
            self.is_over = is_end_of_run(record)
            if not self.is_away:
                is_failure = record.name not in ("left", "stopped")
                self._leave(record.time, f"{record.name}: {record.text}", is_failure=is_failure)
            elif record.name == DIED:
                self.absences[-1] = replace(
                    self.absences[-1], cause=f"{record.name}: {record.text}", is_failure=True
                )
        elif self._is_start(record) and not self.is_away and before is not None:
            self._leave(before, UNNOTED, is_failure=True)
            self._unnoted = Incident(time=before, island=self.name, kind=DIED, cause=UNNOTED)
            self._run.add_incident(self._unnoted)
        if record.name == JOINED:
            self._unnoted = None
            self._enter(record)
        if record.name == "stage":
            self._run.add_stage(record)
        self._last_event = record.name

    def _is_start(self, record: EventRecord) -> bool:
        """Return whether this is the first record of new processes. An island also joins after it
        has caught up.
        """
        if record.name in (STARTED_AGAIN, "resumed"):
            return True
        return (
            record.name == JOINED
            and self.entry_round is not None
            and self._last_event != "caught up"
        )

    def _leave(self, time: float, cause: str, *, is_failure: bool) -> None:
        self.absences.append(Absence(begin=time, end=None, cause=cause, is_failure=is_failure))

    def _enter(self, record: EventRecord) -> None:
        if self.is_away:
            self.absences[-1] = replace(self.absences[-1], end=record.time)
            self.is_over = False
        if self.entry_round is None:
            found = ENTRY.match(record.text)
            self.entry_round = int(found[1]) if found else 0
            self.entry_time = record.time
            if self.entry_round > 0:
                cause = f"at round {self.entry_round}, with the state of the other islands"
                self._run.add_incident(
                    Incident(time=record.time, island=self.name, kind=JOINED, cause=cause)
                )


@dataclass
class Commit:
    """A committed round with its participants, by the records of those that have written one."""

    time: float
    digest: str


class RunAccount:
    """The account of a run and of each of its islands. Records of one island must come in their
    order.
    """

    def __init__(self) -> None:
        self.islands: dict[str, IslandAccount] = {}
        self.incidents: list[Incident] = []
        self.losses: dict[int, tuple[float, float]] = {}
        """Unix time and held-out loss of each evaluation, by the tokens of all islands."""
        self.commits: dict[tuple[int, tuple[str, ...]], Commit] = {}
        self.stages: dict[int, str] = {}
        """The stages that have begun, by number, as `2 of 3`."""
        self.known: set[str] = set()
        """Islands that have taken part in a committed round, also those whose records are
        elsewhere.
        """
        self.last_commit: tuple[tuple[str, ...], Commit] | None = None
        """The participants of the newest committed round, and the commit; None before the first
        one.
        """
        self.missed: dict[tuple[str, float, float | None], int] = {}
        """Rounds missed in absences that are long over, which `count_missed` has counted."""
        self._last_round = -1
        self._outcomes: dict[Attempt, bool] = {}
        self._told: set[tuple[object, ...]] = set()
        self._disagreeing: set[int] = set()

    def island(self, name: str) -> IslandAccount:
        """Return the account of an island; a new one if there is none."""
        if name not in self.islands:
            self.islands[name] = IslandAccount(name, self)
        return self.islands[name]

    @property
    def last(self) -> float:
        """Unix time of the last record of any island; 0 without one."""
        return max((each.times.last for each in self.islands.values()), default=0.0)

    def add_incident(self, incident: Incident, replaces: Incident | None = None) -> None:
        """Add an incident, unless there are too many. `replaces`: one that this one explains."""
        if replaces in self.incidents:
            self.incidents[self.incidents.index(replaces)] = replace(incident, time=replaces.time)
        elif len(self.incidents) < MAX_INCIDENTS:
            self.incidents.append(incident)

    def add_stage(self, record: EventRecord) -> None:
        """Add a stage of the run that an island has entered."""
        told = record.text.partition(" from")[0]
        if found := STAGE.match(told):
            self.stages[int(found[1])] = told

    def add_eval(self, record: EvalRecord) -> None:
        """Add a held-out loss. All islands evaluate the same params, except with gossip."""
        if (loss := finite(record.loss)) is not None:
            self.losses.setdefault(record.tokens, (record.time, loss))

    def add_round(self, island: str, record: RoundRecord) -> None:
        """Add an island's record of an attempt; find whether it differs from that of another
        island.
        """
        attempt = (record.round, record.attempt, record.participants)
        if attempt not in self._told:
            self._told.add(attempt)
            for incident in find_of_round(record):
                self.add_incident(incident)
        if record.is_own:
            return
        if self._outcomes.setdefault(attempt, record.committed) != record.committed:
            self._disagree(record, "one island committed it and another one aborted it")
        if record.committed:
            key = (record.round, record.participants)
            known = self.commits.setdefault(key, Commit(record.time, record.digest))
            known.time = max(known.time, record.time)
            self.known.update(record.participants)
            if record.round >= self._last_round:
                self._last_round = record.round
                self.last_commit = record.participants, known
            if known.digest != record.digest:
                self._disagree(
                    record, f"digests {known.digest[:8]} and {record.digest[:8]} (of {island})"
                )

    def find_slowest(self) -> str | None:
        """Return the island for which the others waited longest in the newest rounds.

        None if they did not wait. They wait for the one that itself waits least.
        """
        waits_of: dict[Attempt, dict[str, float]] = {}
        for name, island in self.islands.items():
            for attempt, wait in island.waits:
                waits_of.setdefault(attempt, {})[name] = wait
        seconds: dict[str, float] = {}
        for waits in waits_of.values():
            least = min(waits, key=lambda name: waits[name])
            seconds[least] = (
                seconds.get(least, 0.0) + sum(waits.values()) - len(waits) * waits[least]
            )
        slowest = max(seconds, key=lambda name: seconds[name], default=None)
        return slowest if slowest is not None and seconds[slowest] > 0 else None

    @property
    def disagreeing_rounds(self) -> list[int]:
        """The rounds whose participants disagree: they committed different results, or one
        committed and another aborted. Each side of a partitioned network may commit a round of one
        number, with other participants; that is no disagreement, and neither are the results of
        gossip.
        """
        return sorted(self._disagreeing)

    def _disagree(self, record: RoundRecord, what: str) -> None:
        if record.round not in self._disagreeing:
            self._disagreeing.add(record.round)
            cause = f"round {record.round}: {what}"
            self.add_incident(Incident(time=record.time, island="", kind=DISAGREEMENT, cause=cause))


def account_for(islands: Iterable[tuple[str, Iterable[Record]]]) -> RunAccount:
    """Return the account of a run from all records of its islands, by name."""
    account = RunAccount()
    for name, records in islands:
        island = account.island(name)
        for record in records:
            island.write(record)
    return account


def count_missed(account: RunAccount, name: str, absence: Absence) -> int:
    """Return how many rounds were committed without an island during one of its absences."""
    key = (name, absence.begin, absence.end)
    if key in account.missed:
        return account.missed[key]
    end = math.inf if absence.end is None else absence.end
    missed = sum(
        name not in names and absence.begin <= c.time <= end
        for (_, names), c in account.commits.items()
    )
    if account.last - end > SETTLED_SECONDS:
        account.missed[key] = missed
    return missed


def find_left_out(account: RunAccount) -> Iterator[tuple[str, int]]:
    """Yield islands that were present while rounds were committed without them, and the number of
    these rounds.
    """
    for name, island in account.islands.items():
        missed = [
            c
            for (_, names), c in account.commits.items()
            if name not in names and island.was_present(c.time)
        ]
        if missed:
            yield name, len(missed)
