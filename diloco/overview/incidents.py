"""Incidents of a run: what an operator wants to know after a night, with its cause and its cure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diloco.formatting import one_line
from diloco.overview.cures import CURES, find_cure
from diloco.records.metrics import LOST, STARTED_AGAIN, EventRecord, RoundRecord
from diloco.records.run_folder import natural_key

DISAGREEMENT = "disagreement"
DIED = "died"
ABORTED = "aborted"
LEFT_OUT = "left out"
JOINED = "joined"
SEVERITIES: Mapping[str, int] = {
    DISAGREEMENT: 4,
    **dict.fromkeys((DIED, "failed", "hung", "stopped", "experts collapsed"), 3),
    **dict.fromkeys((LOST, ABORTED, LEFT_OUT, "alone", "minority", "refused", "not saved"), 2),
    **dict.fromkeys(("loss spike", "dropped", "went back", "rejected"), 2),
    **dict.fromkeys((STARTED_AGAIN, "caught up", JOINED, "left", "invited", "excluded"), 1),
}
"""Kinds of incidents, and how bad each is: 4 is the worst, 1 is good to know."""
MAX_CHARACTERS = 300
MOST_NAMED = 4
KEY = re.compile(r"\b[0-9a-f]{40,}\b")
"""An island's public key, as in its address; its beginning names it."""
DIGESTS = re.compile(r"\bdigest [0-9a-f]{8,}")
"""Found in the cause of an attempt in which islands voted for different states, and in no other."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Something that happened on an island, or to the whole run if `island` is empty."""

    time: float
    """Unix time."""
    island: str
    kind: str
    """A key of SEVERITIES."""
    cause: str
    count: int = 1
    """How often it happened, if several are told as one."""
    others: frozenset[str] = frozenset()
    """The islands of the others, if several are told as one."""

    @property
    def who(self) -> str:
        """The islands that it happened to, as text."""
        names = sorted({self.island, *self.others} - {""}, key=natural_key)
        return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} islands"

    @property
    def severity(self) -> int:
        return SEVERITIES[self.kind]

    @property
    def cure(self) -> str:
        """What the operator can do."""
        return find_cure(self.kind, self.cause)

    def to_row(self) -> list[object]:
        """Return time, island, kind, severity, cause, cure, as the page takes them."""
        return [self.time, self.island, self.kind, self.severity, self.cause, self.cure]


def find_of_event(island: str, record: EventRecord) -> Incident | None:
    """Return the incident that an event is; None for events of a calm run."""
    if record.name == "waiting" and "left out" in record.text:
        text = one_line(record.text)[:MAX_CHARACTERS]
        return Incident(time=record.time, island=island, kind=LEFT_OUT, cause=text)
    if record.name not in SEVERITIES or record.name == JOINED:
        return None
    if is_end_of_run(record):
        return None
    text = KEY.sub(lambda found: f"{found[0][:8]}..", one_line(record.text))[:MAX_CHARACTERS]
    if record.name == LOST:
        lost, _, cause = text.partition(": ")
        return Incident(
            time=record.time, island=lost, kind=LOST, cause=f"{island} lost {lost}: {cause}"
        )
    return Incident(time=record.time, island=island, kind=record.name, cause=text)


def is_end_of_run(record: EventRecord) -> bool:
    """Return whether the island has left because the run is over."""
    return record.name == "left" and record.text.startswith("the run's ")


def find_of_round(record: RoundRecord) -> Iterable[Incident]:
    """Yield the incidents in an attempt at a round. Every island that took part has the same
    ones.
    """
    if not record.committed:
        cause = f"round {record.round}: {one_line(record.cause or 'no cause recorded')}"[
            :MAX_CHARACTERS
        ]
        kind = DISAGREEMENT if DIGESTS.search(cause) else ABORTED
        yield Incident(time=record.time, island="", kind=kind, cause=cause)
    elif record.cause:
        cause = f"round {record.round}: {one_line(record.cause)}"[:MAX_CHARACTERS]
        yield Incident(time=record.time, island="", kind=LEFT_OUT, cause=cause)
    for name, parts in record.gated.items():
        cause = f"{parts} of its parts were not used in round {record.round}: they were outliers"
        yield Incident(time=record.time, island=name, kind=LEFT_OUT, cause=cause)


assert set(CURES) <= set(SEVERITIES), "each cure is for a kind of incident"
