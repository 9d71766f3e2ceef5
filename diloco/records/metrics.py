"""The records of an island: one JSON object per line of metrics.jsonl, also sent to sinks. Does not
import torch.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from diloco.records.best_effort import best_effort
from diloco.records.growing_file import ends_inside_a_line

if TYPE_CHECKING:
    from outer.leases.ledger import Ledger
    from outer.report import RoundReport

log = logging.getLogger(__name__)


OF_SOME_MODELS = ("expert_loads", "routing", "depth_losses")
"""Fields of a step that only models with experts have, or with multi-token prediction."""
SAVING = "saving"
"""Name of a pause in which the island takes a copy of its state for a checkpoint."""
STARTED_AGAIN = "started again"
"""Event that the island's processes have been started again. Its text: how they ended before."""
LOST = "lost"
"""Event that this island has lost another one. Its text: that one's name, a colon, the cause."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One inner step. `tokens` is the island's total so far; `loss` is None if it or the gradient
    is not finite.
    """

    step: int
    tokens: int
    loss: float | None
    lr: float
    grad_norm: float | None
    seconds: float
    tokens_per_second: float
    mfu: float | None = None
    """Model FLOPs utilisation: the share of the ranks' peak, which the logbook names."""
    skipped: bool = False
    data_seconds: float | None = None
    """Seconds for which the leader waited for the step's text; not part of `seconds`."""
    source_tokens: dict[str, int] = field(default_factory=dict)
    """The step's tokens by source, if the data is a mixture."""
    spike: float | None = None
    """If the loss is a spike: its distance from the earlier mean, in standard deviations."""
    noise_scale: dict[str, float] = field(default_factory=dict)
    """Estimates of the gradient's noise, if it was measured.

    `signal` is the squared norm without noise, `noise` the trace of the covariance of one token's
    gradient, and `tokens` the ratio noise / signal, left out unless both are positive. The
    estimates vary much: average `signal` and `noise` over steps before dividing.
    """
    expert_loads: dict[str, float] = field(default_factory=dict)
    """For each layer with experts, by its number: the tokens of the fullest expert divided by the
    mean over its experts."""
    routing: dict[str, float] = field(default_factory=dict)
    """For a model with experts: `sequence_loss` (1 at balance) and `router_z_loss` per token and
    layer, each if it has a weight, and `dropped`, the number of choices above the capacity."""
    depth_losses: dict[str, float] = field(default_factory=dict)
    """With multi-token prediction: the loss of each extra depth, from 1 on. `loss` is that of the
    next token.
    """
    loss_scale: float | None = None
    overflow: bool = False
    """In float16: the factor of the losses, and whether the gradient was too large with it and was
    skipped.
    """
    time: float = field(default_factory=time.time)
    kind: Literal["step"] = "step"


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One attempt at a round. Byte counts are the whole process's, including the round
    protocol's.
    """

    round: int
    attempt: int
    participants: tuple[str, ...]
    committed: bool
    digest: str
    """Digest of the committed state after the round, hex."""
    bytes_sent: int
    bytes_received: int
    reduce_seconds: float
    wait_seconds: float
    pseudo_gradient_norm: float | None
    cause: str | None = None
    """Why the attempt was aborted; with gossip, which islands were left out, and why."""
    is_own: bool = False
    """With gossip: whether the digest is of this island's own global params, which differ from the
    others'.
    """
    steps: int = 0
    """Number of inner steps in this island's contribution."""
    tokens: int = 0
    """Number of tokens in this island's contribution, which is its weight in the mean."""
    stalled_seconds: float = 0.0
    """Seconds for which all attempts at the round stalled the training."""
    gated: dict[str, int] = field(default_factory=dict)
    """Number of parts, by island, that this island's leader, their reducer, left out."""
    base: str = ""
    """Digest of the committed state before the round."""
    units: list[list[int]] = field(default_factory=list)
    """Data units that this island's contribution was trained on, as ranges of [first, count,
    stride].
    """
    trained_units: int = 0
    """Data units that all islands have trained in committed rounds, by the ledger after the
    attempt.
    """
    open_units: int = 0
    """Data units that are leased or returned but not trained, by the same ledger."""
    listeners: tuple[str, ...] = ()
    """Participants that contributed nothing to the round because they were still training."""
    audited: int = 0
    """Number of parts that others reduced and this island recomputed."""
    planner: str = ""
    """The planner of the attempt: the coordinator among more than four islands; "" with gossip."""
    mean_norm: float | None = None
    """L2 norm of the mean pseudo-gradient; None if the attempt has none."""
    mean_cosine: float | None = None
    """Cosine of the angle between this island's pseudo-gradient and the mean, if both exist."""
    signers: int = 0
    """Number of islands that signed the committed state, by this island's certificate."""
    ranks: list[list[float]] = field(default_factory=list)
    """Where each rank's training thread spent its time since the last landed round.

    Empty for one rank. One list per rank: its number, then seconds in steps, reading text,
    computing, ready but without a processor, between steps, and, in newer records, in which the
    whole process was stopped.
    """
    time: float = field(default_factory=time.time)
    """Unix time at the end of the attempt, which consists of the wait and then the reduce."""
    kind: Literal["round"] = "round"

    @classmethod
    def from_report(
        cls,
        report: "RoundReport",
        *,
        steps: int,
        tokens: int,
        waited_seconds: float,
        ledger: "Ledger",
        ranks: list[list[float]] | None = None,
    ) -> "RoundRecord":
        """Return the record of an attempt with this island's inner steps and tokens.

        `waited_seconds` is how long the round stalled the training; the committed attempt alone
        records it.
        """
        # Fields that have the same name in RoundReport are copied.
        names = {each.name for each in fields(cls)} & {each.name for each in fields(report)}
        values = {name: getattr(report, name) for name in names}
        values |= {
            "participants": tuple(report.participants),
            "committed": report.is_committed,
            "pseudo_gradient_norm": report.pseudo_grad_norm,
            "cause": report.cause or None,
            "steps": steps,
            "tokens": tokens,
            "stalled_seconds": waited_seconds if report.is_committed else 0.0,
            "units": report.unit_triples,
            "trained_units": ledger.trained,
            "open_units": ledger.open,
            "listeners": tuple(report.listeners),
            "ranks": ranks or [],
        }
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """Held-out loss of the global params, in nats per token. `tokens` is the sum over all
    islands.
    """

    round: int
    tokens: int
    loss: float | None
    bits_per_byte: float | None
    source_losses: dict[str, float | None] = field(default_factory=dict)
    """The loss by source, if the data is a mixture."""
    seconds: float = 0.0
    """Duration of the evaluation, in which the island did not train; 0 in older records."""
    time: float = field(default_factory=time.time)
    kind: Literal["eval"] = "eval"


@dataclass(frozen=True, kw_only=True)
class PauseRecord:
    """A time in which the island did not train, for another reason than a round or an
    evaluation.
    """

    name: str
    """The reason: SAVING."""
    seconds: float
    time: float = field(default_factory=time.time)
    """Unix time at the end of the pause."""
    kind: Literal["pause"] = "pause"


@dataclass(frozen=True, kw_only=True)
class TrafficRecord:
    """Bytes that rank 0 sent to other ranks of its island in one inner step, by axis of the
    mesh.
    """

    step: int
    sent: dict[str, int]
    planned: dict[str, int]
    """The same by `diloco mesh`; empty if it cannot tell."""
    time: float = field(default_factory=time.time)
    kind: Literal["traffic"] = "traffic"


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """An event in the life of the island: `joined`, `left`, `alone`, `stopped`, ..."""

    name: str
    text: str = ""
    time: float = field(default_factory=time.time)
    kind: Literal["event"] = "event"


Record = StepRecord | RoundRecord | EvalRecord | EventRecord | PauseRecord | TrafficRecord


class Sink(Protocol):
    """A destination for records besides metrics.jsonl. Only rank 0 of an island has sinks.

    >>> class PrintSink:
    ...     def write(self, record: Record) -> None:
    ...         print(record.kind, record.name if isinstance(record, EventRecord) else "")
    ...     def close(self) -> None:
    ...         print("closed")
    >>> metrics = Metrics(Path("/dev/null"), sinks=[PrintSink()])
    >>> metrics.write(EventRecord(name="joined", text="at round 3"))
    event joined
    >>> metrics.close()
    closed
    """

    def write(self, record: Record) -> None:
        """Write or queue one record without waiting for a network."""

    def close(self) -> None:
        """Write all pending records."""


class Metrics:
    """Appends records to `path`, one complete line at a time: a kill leaves a readable file.

    A problem of the disk or of a sink is logged. It neither ends the training nor keeps it from
    starting. Records that cannot be written are lost, and a sink that fails gets no further
    records.
    """

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = list(sinks)
        self._lock = threading.RLock()
        self._path = path
        self._num_lost = 0
        self._file: RawIOBase | None = None
        self._is_inside_a_line = self._is_closed = False
        with suppress(
            OSError
        ):  # Each record tries to open it again, and the first failure is logged.
            self._open()

    @property
    def path(self) -> Path:
        """The file to which records are appended."""
        return self._path

    def add_sink(self, sink: Sink) -> None:
        """Also pass all later records to this sink."""
        with self._lock:
            self._sinks.append(sink)

    def write(self, record: Record) -> None:
        """Append the record to the file and pass it to all sinks. May be called from any thread."""
        with self._lock:
            if not self._is_closed:  # A round may still be under way when the process ends.
                self._write(record)

    def _write(self, record: Record) -> None:
        self._append(record)
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:  # noqa: BLE001 - errors in third-party code must not end the training
                self._sinks.remove(sink)
                _warn(sink, "gets no more records; training goes on", error)

    def close(self) -> None:
        """Close the file and the sinks. Idempotent."""
        self._is_closed = True
        if self._file is not None:
            with best_effort(f"{self._path} may lack the last records"):
                self._file.close()
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - as in _write
                _warn(sink, "may miss the last records", error)

    def _append(self, record: Record) -> None:
        try:
            problem = (
                "" if self._append_line(to_line(record).encode("ascii")) else "the disk is full"
            )
        except (OSError, TypeError, ValueError) as error:
            problem = str(error)
        if problem and self._num_lost == 0:
            log.error(
                "%s: cannot be written (%s): records are lost; training goes on",
                self._path,
                problem,
            )
        elif not problem and self._num_lost:
            log.warning(
                "%s: can be written again; %d records are missing from it",
                self._path,
                self._num_lost,
            )
        self._num_lost = self._num_lost + 1 if problem else 0

    def _append_line(self, line: bytes) -> bool:
        """Write the line and return whether it was written completely. Raises OSError."""
        file = self._file or self._open()
        line = b"\n" * self._is_inside_a_line + line
        self._is_inside_a_line = (file.write(line) or 0) < len(line)
        return not self._is_inside_a_line

    def _open(self) -> RawIOBase:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that each line is one system call and a killed process loses nothing.
        self._file = self._path.open("ab", buffering=0)
        self._is_inside_a_line = ends_inside_a_line(self._path)
        return self._file


def _warn(sink: Sink, consequence: str, error: Exception) -> None:
    log.error(
        "%s failed (%s: %s): it %s", type(sink).__name__, type(error).__name__, error, consequence
    )


def to_line(record: Record) -> str:
    """Return the record as one line of JSON. Infinity and NaN, which JSON lacks, become null.

    Fields in OF_SOME_MODELS are left out of the records of other models.
    """
    values = asdict(record)
    values = {key: value for key, value in values.items() if value or key not in OF_SOME_MODELS}
    values |= {
        key: None
        for key, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    return json.dumps(values, allow_nan=False) + "\n"
