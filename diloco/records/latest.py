"""The latest known state of an island, updated from each of its records."""

from dataclasses import dataclass, field

from diloco.formatting import one_line
from diloco.records.metrics import EvalRecord, EventRecord, Record, RoundRecord, StepRecord

ENDS = ("left", "hung", "failed", "stopped")
"""Names of the events with which an island's processes end."""


@dataclass
class LatestRecords:
    """The latest value of each figure.

    A Sink: takes records in the order in which they were written.
    """

    name: str
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    round: int | None = None
    num_participants: int | None = None
    committed: set[int] = field(default_factory=set)
    """Numbers of the committed rounds."""
    num_aborted: int = 0
    bytes_sent: int = 0
    digest: str = ""
    """Digest of the state after the last committed round."""
    eval_loss: float | None = None
    eval_round: int = -1
    event: str = ""
    """The latest event, until it is over."""
    event_time: float = 0.0
    """Unix time of `event`."""
    time: float = 0.0
    """Unix time of the last record."""
    end: str = ""
    """The event with which the island ended; empty if a later record followed."""

    def write(self, record: Record) -> None:
        """Apply the next record."""
        self.time = record.time
        self.end = ""
        match record:
            case StepRecord():
                self.step = record.step
                self.tokens = record.tokens
                self.tokens_per_second = record.tokens_per_second
                self.loss = self.loss if record.loss is None else record.loss
            case RoundRecord():
                self._write_round(record)
            case EvalRecord():
                self.eval_loss = record.loss
                self.eval_round = record.round
            case EventRecord():
                self._note(f"{record.name}: {record.text}" if record.text else record.name, record.time)
                self.end = record.name if record.name in ENDS else ""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _write_round(self, record: RoundRecord) -> None:
        self.round = record.round
        self.num_participants = len(record.participants)
        self.bytes_sent += record.bytes_sent
        if record.committed:
            self.committed.add(record.round)
            self.digest = record.digest
            self.event = "" if self.event.startswith("waiting:") else self.event
        else:
            self.num_aborted += 1
        if record.cause:
            self._note(f"round {record.round}{'' if record.committed else ' aborted'}: {record.cause}", record.time)

    def _note(self, text: str, time: float) -> None:
        self.event = one_line(text)
        self.event_time = time
