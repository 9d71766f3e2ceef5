"""What the outer loop is given besides the run's config, and what it says of each attempt."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from outer.errors import OuterError
from outer.phases import NO_HOOKS, Hooks
from outer.runs import Runs


@dataclass(frozen=True)
class Settings:
    """What the outer loop does on this island besides the run's config."""

    max_tokens: int = 1 << 52
    """Most tokens that any island trains on in a round; larger claims are refused."""
    joins: bool = False
    """Never begin a run: take the state of others."""
    index: int = 0
    """Which of the first leases of text is this island's; none from start_islands on."""
    seed: int = 0
    """The run's: with gossip, who averages with whom follows from it."""
    cache_dir: Path | None = None
    """Where parts of a state are kept while they come; None: a restarted island takes all of them anew."""
    hooks: Hooks = NO_HOOKS
    total_tokens: int | None = None
    """With rounds that wait for a quorum: the run is over when so many are committed; None: never."""
    now: Callable[[], float] = time.monotonic
    """Seconds, by which timed rounds go; the leader's."""


@dataclass(frozen=True)
class RoundReport:
    """What came of one attempt at a round, as this island saw it; bytes are its ranks' since the last report."""

    round: int
    attempt: int
    participants: list[str]
    is_committed: bool
    digest: str
    """Of the committed state afterwards."""
    base: str
    """Of the committed state before."""
    units: Runs
    """Of text, read by what this island gave to the attempt."""
    bytes_sent: int
    bytes_received: int
    reduce_seconds: float
    wait_seconds: float
    pseudo_grad_norm: float
    gated: dict[str, int]
    """By island: parts that this island's leader, as their reducer, left out of the mean."""
    cause: str
    """Why it was aborted; with gossip, who was left out, and why."""
    is_own: bool = False
    """Gossip: the digest is of this island's own state, which differs from the others'."""
    listeners: list[str] = field(default_factory=list)
    """Participants that gave nothing, for they still trained."""


@dataclass(frozen=True)
class Landing:
    """What came of a round: all its attempts, the last one committed."""

    reports: list[RoundReport]
    waited_seconds: float
    """That inner steps stood still for it; the rest of the round was behind the training."""


class CaughtUp(OuterError):
    """This island has taken the state of others, for they have committed without it; it goes on from there.

    `is_kept`: its progress since the last commit is on top of that state, as if made there.
    """

    def __init__(self, cause: str, *, is_kept: bool) -> None:
        super().__init__(cause)
        self.is_kept = is_kept
