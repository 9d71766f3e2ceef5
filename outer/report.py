"""Settings of the outer loop on one island, and its reports on each attempt at a round."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outer.errors import OuterError
from outer.hooks import NO_HOOKS, Hooks
from outer.leases.ranges import Ranges, triple


@dataclass(frozen=True)
class Waiting:
    """The islands and other things for which an island waits at the end of a round."""

    round: int
    phase: Literal["gathering", "voting"]
    seconds: float
    """The time in seconds for which it has waited."""
    islands: Mapping[str, str]
    """Reasons why the round waits for these islands or continues without them, by island."""
    cause: str = ""
    """Another cause that stops the round from continuing, such as too few islands."""

    def __str__(self) -> str:
        islands = (
            "; ".join(f"{name}: {why}" for name, why in sorted(self.islands.items()))
            or "all known islands are here"
        )
        return (
            f"round {self.round}: {self.phase} for {self.seconds:.0f} s; "
            f"{self.cause}{'; ' * bool(self.cause)}{islands}"
        )


@dataclass(frozen=True)
class LoopSettings:
    """Settings for the outer loop on this island, besides the config that all islands share."""

    max_tokens: int = 1 << 52
    """Largest number of tokens that any island may claim for a round; larger claims are refused."""
    experts_per_token: int = 0
    """Number of experts that each token chooses in a layer, if the loop counts these choices;
    otherwise 0.
    """
    joins: bool = False
    """Whether the island must take the state of other islands and never begin a run."""
    index: int = 0
    """Index of the island's lease among the first leases of data. An island with an index of
    start_islands or more has none."""
    stage_rounds: tuple[int, ...] = ()
    """The first round of each stage of the run after the first stage, if islands wait for all."""
    stage_tokens: tuple[int, ...] = ()
    """The committed tokens with which each of these stages begins, if islands wait for a quorum."""
    owners: tuple[str, ...] = ()
    """Islands with data of their own, whose trained units the ledger counts."""
    seed: int = 0
    """The run's seed; it decides the partners of each gossip round."""
    link_kbit: int = 0
    """Rate of the island's link in kbit/s; 0 if it is not known."""
    loss_scale: Callable[[], int | None] = lambda: None
    """Function that returns the island's present loss scale, as a logarithm to base 2; None if it
    has none. It is called only on the leader, on any thread.
    """
    cache_dir: Path | None = None
    """Folder that keeps parts during a download. Without it a restarted island downloads all parts
    again.
    """
    hooks: Hooks = NO_HOOKS
    now: Callable[[], float] = time.monotonic
    """The leader's clock for timed rounds, in seconds."""
    on_wait: Callable[[Waiting | None], None] = lambda waiting: None
    """Function called every few seconds while a round makes no progress, and with None when it
    continues.

    It is called only on the leader, on the event loop's thread, so it must return at once.
    """
    on_lost: Callable[[str, str], None] = lambda island, cause: None
    """Function called with an island that has just become lost, and the cause. It is called like
    `on_wait`."""
    on_download: Callable[[str], None] = lambda text: None
    """Function called every few seconds of a download of other islands' state with its progress.
    It is called on every rank, otherwise like `on_wait`."""
    on_abort: Callable[["RoundReport"], None] = lambda report: None
    """Function called with each aborted attempt, immediately, on every rank and on the thread of
    the round."""


@dataclass(frozen=True)
class RoundReport:
    """Report of one attempt at a round on this island. Bytes are totals of all its ranks since
    the last report.
    """

    round: int
    attempt: int
    participants: list[str]
    is_committed: bool
    digest: str
    """Digest of the committed state after the attempt."""
    base: str
    """Digest of the committed state before the attempt."""
    units: Ranges
    """Units of data in this island's contribution to the attempt."""
    bytes_sent: int
    bytes_received: int
    reduce_seconds: float
    wait_seconds: float
    pseudo_grad_norm: float
    gated: dict[str, int]
    """Number of parts that this island's leader, as their reducer, left out of the mean, by
    island."""
    cause: str
    """Reason why the attempt was aborted; in a gossip run, which partners were left out and why."""
    is_own: bool = False
    """Gossip only: whether the digest is of this island's own state, which differs from the
    others'."""
    listeners: list[str] = field(default_factory=list)
    """Observers: participants that contributed nothing because they were still training."""
    audited: int = 0
    """Number of parts of other reducers that this island recomputed."""
    planner: str = ""
    """The island that planned the attempt; among more than four islands the coordinator. Empty
    in a gossip run."""
    mean_norm: float | None = None
    """L2 norm of the mean, without moments; None if the reduce failed, or in a gossip run."""
    mean_cosine: float | None = None
    """Cosine of the angle between this island's pseudo-gradient and the mean; None if one of the
    two is missing."""
    signers: int = 0
    """Number of islands whose signatures are in this island's certificate of the committed
    state; 0 on ranks other than the leader, or without a certificate."""

    loss_scale: int | None = None
    """Smallest loss scale of the participants, as a logarithm to base 2; None if none has one."""
    earlier: int | None = None
    """The round whose state the islands go back to; None if they average."""

    def __str__(self) -> str:
        fate = "committed" if self.is_committed else "aborted"
        cause = f" ({self.cause})" if self.cause else ""
        return (
            f"round {self.round} attempt {self.attempt}: {fate}{cause} with "
            f"{', '.join(self.participants)}; "
            f"{self.bytes_sent:,} bytes sent, {self.bytes_received:,} received; waited "
            f"{self.wait_seconds:.1f} s, "
            f"reduced in {self.reduce_seconds:.1f} s; pseudo-gradient {self.pseudo_grad_norm:.3g}; "
            f"digest {self.digest[:12]}"
        )

    @property
    def unit_triples(self) -> list[list[int]]:
        """`units` as lists of [first, count, stride], for JSON."""
        return [triple(units) for units in self.units]


@dataclass(frozen=True)
class Landing:
    """A round that has landed: all its attempts, the committed one last."""

    reports: list[RoundReport]
    waited_seconds: float
    """Seconds that inner steps waited for the round. The rest of the round ran in the
    background."""


class CaughtUp(OuterError):
    """Others have committed without this island. It has taken their state and continues from there.

    `is_kept`: its progress since the last commit was put on top of that state, as if it had been
    made from there.
    """

    def __init__(self, cause: str, *, is_kept: bool) -> None:
        super().__init__(cause)
        self.is_kept = is_kept
