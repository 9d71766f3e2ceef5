"""What an island records while it trains: one JSON object a line in metrics.jsonl, and the same to sinks."""

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One inner step. `tokens` is this island's sum so far; `loss` is None when the step was skipped."""

    step: int
    tokens: int
    loss: float | None
    lr: float
    grad_norm: float | None
    seconds: float
    tokens_per_second: float
    mfu: float | None = None
    """Model FLOPs utilisation: share of the ranks' measured matmul peak that the model's arithmetic used."""
    skipped: bool = False
    data_seconds: float | None = None
    """The leader waited so long for the step's text, beside `seconds`."""
    source_tokens: dict[str, int] = field(default_factory=dict)
    """Of a mixture: this step's tokens by source."""
    time: float = field(default_factory=time.time)
    kind: Literal["step"] = "step"


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One attempt at a round. Bytes are those that left and entered the process, protocol included."""

    round: int
    attempt: int
    participants: tuple[str, ...]
    committed: bool
    digest: str
    """Of the committed state after the round, hex."""
    bytes_sent: int
    bytes_received: int
    reduce_seconds: float
    wait_seconds: float
    pseudo_gradient_norm: float | None
    cause: str | None = None
    """Why the attempt was aborted; with gossip, who was left out, and why."""
    is_own: bool = False
    """Gossip: the digest is of global params that are this island's own."""
    steps: int = 0
    """Inner steps whose progress this island gave to the attempt."""
    tokens: int = 0
    """That they were trained on: the island's weight in the mean."""
    stalled_seconds: float = 0.0
    """Inner steps stood still so long for the round, all its attempts together; the rest was behind them."""
    gated: dict[str, int] = field(default_factory=dict)
    """By island: parts that this island's leader, as their reducer, left out of the mean."""
    base: str = ""
    """Digest of the committed state before the round."""
    units: list[list[int]] = field(default_factory=list)
    """Of text, read by what this island gave to the attempt: runs of [first, count, stride]."""
    trained_units: int = 0
    """In committed rounds, by all islands, as far as the account says after the attempt."""
    open_units: int = 0
    """Leased or returned then, and not trained."""
    listeners: tuple[str, ...] = ()
    """Participants that gave nothing to the round, for they still trained."""
    time: float = field(default_factory=time.time)
    """The end of the attempt: the wait came first, then the reduce."""
    kind: Literal["round"] = "round"


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """Held-out loss, in nats a token, on the global params; `tokens` counts all islands."""

    round: int
    tokens: int
    loss: float | None
    bits_per_byte: float | None
    time: float = field(default_factory=time.time)
    kind: Literal["eval"] = "eval"


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that happened to the island: `joined`, `left`, `alone`, `stopped`, ..."""

    name: str
    text: str = ""
    time: float = field(default_factory=time.time)
    kind: Literal["event"] = "event"


Record = StepRecord | RoundRecord | EvalRecord | EventRecord


class Sink(Protocol):
    """A further place for records. Only an island's rank 0 has sinks."""

    def write(self, record: Record) -> None:
        """Take one record; does not wait for a network."""
        ...

    def close(self) -> None:
        """Write out what is pending."""
        ...


class Metrics:
    """Appends records to `path`, a whole line at a time: a killed island leaves lines that parse.

    What ails the disk does not end the training: records that cannot be written are lost, and a sink that fails gets
    no more of them, which is logged.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: each line is one write to the system, and nothing is lost when the process is killed.
        self._file = path.open("ab", buffering=0)
        self._sinks = list(sinks)
        self._path, self._num_lost = path, 0
        self._is_inside_a_line = _ends_inside_a_line(path)

    def step(self, record: StepRecord) -> None:
        """Record an inner step."""
        self._write(record)

    def round(self, record: RoundRecord) -> None:
        """Record an attempt at a round, committed or aborted."""
        self._write(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Record a held-out loss."""
        self._write(record)

    def event(self, record: EventRecord) -> None:
        """Record an event."""
        self._write(record)

    def close(self) -> None:
        """Close the file and the sinks. Idempotent."""
        self._file.close()
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - as in _write
                _warn(sink, "may miss the last records", error)

    def _write(self, record: Record) -> None:
        self._append(to_line(record).encode("ascii"))
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:  # noqa: BLE001 - other people's code, which the training must outlive
                self._sinks.remove(sink)
                _warn(sink, "gets no more records; training goes on", error)

    def _append(self, line: bytes) -> None:
        line = b"\n" * self._is_inside_a_line + line
        try:
            written = self._file.write(line)
        except OSError as error:
            self._lose(str(error))
            return
        self._is_inside_a_line = written < len(line)
        if self._is_inside_a_line:
            self._lose("the disk is full")
        elif self._num_lost:
            log.warning("%s: has room again; %d records are missing from it", self._path, self._num_lost)
            self._num_lost = 0

    def _lose(self, problem: str) -> None:
        if self._num_lost == 0:
            log.error("%s: cannot be written (%s): records are lost; training goes on", self._path, problem)
        self._num_lost += 1


def _warn(sink: Sink, what: str, error: Exception) -> None:
    log.error("%s failed (%s: %s): it %s", type(sink).__name__, type(error).__name__, error, what)


def to_line(record: Record) -> str:
    """The record as one JSON line; inf and nan, which JSON does not have, become null."""
    fields = {key: None if _is_not_finite(value) else value for key, value in asdict(record).items()}
    return json.dumps(fields, allow_nan=False) + "\n"


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _ends_inside_a_line(path: Path) -> bool:
    """Whether an earlier process was killed in the middle of a line."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
