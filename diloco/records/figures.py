"""The figures of an island and of a run, each derived from the records in one place.

`diloco status`, `diloco watch`, the dashboard, the summary and the report only format them.
"""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from diloco.formatting import UNKNOWN, human_bytes, human_count, human_loss, one_line
from diloco.records.metrics import (
    EvalRecord,
    EventRecord,
    PauseRecord,
    Record,
    RoundRecord,
    StepRecord,
    TrafficRecord,
)

ENDS = ("left", "hung", "failed", "stopped", "died")
"""Names of the events with which an island's processes end."""


@dataclass(frozen=True, kw_only=True)
class IslandFigures:
    """The figures of one island after its last record."""

    name: str
    step: int = 0
    """The last inner step of the run that the island has made."""
    round: int = 0
    """Committed rounds of the run after the island's last commit: 40 after the commit of round
    39.
    """
    num_participants: int | None = None
    """Islands in the plan of the last attempt; None before the first one."""
    committed: int = 0
    """Rounds that the island has committed. A round that is repeated after a stop counts once."""
    aborted: int = 0
    """Attempts at rounds that were aborted on the island."""
    tokens: int | None = 0
    """Tokens of all inner steps, those repeated after a stop included; None if an island's answer
    lacks them.
    """
    tokens_per_second: float | None = None
    """Of the last inner step."""
    step_seconds: float = 0.0
    reduce_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Seconds in all inner steps, in the reduces of all attempts, and waiting for other islands
    before them.
    """
    loss: float | None = None
    """Training loss of the last inner step that had one, in nats per token."""
    heldout_loss: float | None = None
    """Loss of the global params in the last evaluation, in nats per token."""
    bits_per_byte: float | None = None
    """The same loss in bits per byte of text."""
    heldout_round: int = -1
    """Committed rounds of the run at that evaluation; -1 before the first one."""
    bytes_sent: int = 0
    bytes_received: int = 0
    """Bytes of all attempts, with the messages of the round protocol."""
    digest: str = ""
    """Digest of the state after the last committed round, hex; empty before it."""
    event: str | None = None
    """The latest event, until it is over."""
    event_time: float = 0.0
    """Unix time of `event`."""
    last_record: float | None = None
    """Unix time of the last record."""
    end: str | None = None
    """The event with which the island ended; None if a later record followed."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The figures of a run: of all its islands together."""

    num_islands: int
    step: int
    """The last inner step of the most advanced island."""
    round: int
    """Committed rounds of the run, by the most advanced island."""
    committed: int
    """Rounds that any island has committed."""
    aborted: int
    """Attempts that were aborted on any island."""
    tokens: int
    tokens_per_second: float
    bytes_sent: int
    """Sums over the islands."""
    heldout_round: int
    heldout_loss: float | None
    bits_per_byte: float | None
    """Of the evaluation after the most rounds."""


class LatestRecords:
    """Keeps the figures of an island up to date. A Sink: takes records in the order in which they
    were written.

    It also has the numbers of committed rounds, (round, attempt) of aborted attempts, and trained
    tokens by source of a mixture.
    """

    def __init__(self, name: str) -> None:
        self.figures = IslandFigures(name=name)
        self.committed: set[int] = set()
        self.aborted: set[tuple[int, int]] = set()
        self.source_tokens = Counter[str]()
        self._own_tokens = 0

    def write(self, record: Record) -> None:
        """Apply the next record."""
        self.figures = replace(
            self.figures, **{"last_record": record.time, "end": None} | self._changes(record)
        )

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _changes(self, record: Record) -> dict[str, Any]:
        match record:
            case StepRecord():
                loss = finite(record.loss)
                self.source_tokens.update(record.source_tokens)
                return {
                    "step": record.step,
                    "tokens": self._count_tokens(record),
                    "tokens_per_second": finite(record.tokens_per_second),
                    "step_seconds": self.figures.step_seconds + (finite(record.seconds) or 0.0),
                    "loss": self.figures.loss if loss is None else loss,
                }
            case RoundRecord():
                return self._changes_of_round(record)
            case EvalRecord():
                losses = {
                    "heldout_loss": finite(record.loss),
                    "bits_per_byte": finite(record.bits_per_byte),
                }
                return losses | {"heldout_round": record.round}
            case EventRecord():
                text = f"{record.name}: {record.text}" if record.text else record.name
                end = record.name if record.name in ENDS else None
                return {"event": one_line(text), "event_time": record.time, "end": end}
            case PauseRecord() | TrafficRecord():
                return {}

    def _changes_of_round(self, record: RoundRecord) -> dict[str, Any]:
        now = self.figures
        changes: dict[str, Any] = {
            "num_participants": len(record.participants),
            "bytes_sent": now.bytes_sent + record.bytes_sent,
            "bytes_received": now.bytes_received + record.bytes_received,
            "reduce_seconds": now.reduce_seconds + (finite(record.reduce_seconds) or 0.0),
            "wait_seconds": now.wait_seconds + (finite(record.wait_seconds) or 0.0),
        }
        if record.committed:
            self.committed.add(record.round)
            is_over = (now.event or "").startswith("waiting:")
            changes |= {
                "round": record.round + 1,
                "digest": record.digest,
                "event": None if is_over else now.event,
            }
        else:
            self.aborted.add((record.round, record.attempt))
        if record.cause:
            what = f"round {record.round}{'' if record.committed else ' aborted'}"
            changes |= {"event": one_line(f"{what}: {record.cause}"), "event_time": record.time}
        return changes | {"committed": len(self.committed), "aborted": len(self.aborted)}

    def _count_tokens(self, record: StepRecord) -> int:
        """Return the tokens of all steps so far. After a restart the record's own total may begin
        lower.
        """
        gained = record.tokens - self._own_tokens
        self._own_tokens = record.tokens
        if gained <= 0:
            gained = (
                0
                if record.skipped
                else round(finite(record.tokens_per_second * record.seconds) or 0.0)
            )
        return (self.figures.tokens or 0) + gained


def combine(islands: Collection[LatestRecords]) -> RunFigures:
    """Return the figures of the run that has these islands."""
    figures = [island.figures for island in islands]
    newest = max(figures, key=lambda each: each.heldout_round, default=None)
    return RunFigures(
        num_islands=len(figures),
        step=max((each.step for each in figures), default=0),
        round=max((each.round for each in figures), default=0),
        committed=len(set[int]().union(*(island.committed for island in islands))),
        aborted=len(set[tuple[int, int]]().union(*(island.aborted for island in islands))),
        tokens=sum(each.tokens or 0 for each in figures),
        tokens_per_second=sum(each.tokens_per_second or 0.0 for each in figures),
        bytes_sent=sum(each.bytes_sent for each in figures),
        heldout_round=newest.heldout_round if newest else -1,
        heldout_loss=newest.heldout_loss if newest else None,
        bits_per_byte=newest.bits_per_byte if newest else None,
    )


def finite(value: float | None) -> float | None:
    """Return the value, or None if JSON cannot represent it."""
    return value if value is not None and math.isfinite(value) else None


def cells(figures: IslandFigures, num_steps: int | None) -> dict[str, str]:
    """Return the figures as the text of a table's cells, by column. `num_steps`: those of the whole
    run.
    """
    return {
        "island": figures.name,
        "step": f"{figures.step}/{num_steps}" if num_steps else str(figures.step),
        "round": str(figures.round),
        "peers": UNKNOWN if figures.num_participants is None else str(figures.num_participants),
        "loss": human_loss(figures.loss),
        "held-out": human_loss(figures.heldout_loss),
        "tok/s": human_count(figures.tokens_per_second),
        "ok/abort": f"{figures.committed}/{figures.aborted}",
        "sent": human_bytes(figures.bytes_sent),
        "digest": figures.digest[:8] or UNKNOWN,
    }
