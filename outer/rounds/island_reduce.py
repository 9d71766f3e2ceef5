"""The reduce of one attempt on all ranks of an island, and what the island votes after it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outer.agreement.messages import Plan
from outer.errors import OuterError, PoisonError, StalledError, TransportError
from outer.network.event_loop import EventLoopThread
from outer.network.rejections import Rejections
from outer.reduce.attempt import Attempts
from outer.reduce.payloads import Mean
from outer.state.replica import Replica
from outer.transfer.donor import Donor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReduceResult:
    """One rank's means, and the verdict of all ranks of the island, the same on each."""

    means: dict[int, Mean]
    """By part that this rank carries."""
    digest: str | None
    """Digest of the means of all ranks, or None when the reduce failed on one."""
    cause: str = ""
    """Why it failed."""
    at_fault: str | None = None
    """The island whose payload or pseudo-gradient could not be used; None if the network failed."""


@dataclass
class IslandReduce:
    """Every rank of the island builds it and calls `run` together, with the same plan."""

    island: str
    replica: Replica
    attempts: Attempts
    event_loop: EventLoopThread
    rejections: Rejections
    donor: Donor
    """Serves fewer parts at once while a reduce runs."""

    def run(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> ReduceResult:
        """Reduce this rank's parts; empty `pseudo_grads` if the island observes. Never raises for a failed reduce."""
        means, failure = {}, None
        self.donor.is_busy = True
        try:
            means = self.event_loop.run(self.attempts.run(plan, pseudo_grads))
        except OuterError as error:
            log.info("round %d attempt %d failed here: %s", plan.round, plan.attempt, error)
            failure = error
        finally:
            self.donor.is_busy = False
        ranks = self.replica.ranks.background
        results = ranks.gather((None if failure is None else str(failure), self._find_fault(failure)))
        failed = [(cause, at_fault) for cause, at_fault in results if cause is not None]
        if not failed:
            digests = {index: mean.digest for index, mean in means.items()}
            return ReduceResult(means, self.replica.combine(digests, ranks))
        # This island's own fault comes first, then a peer's: ranks without a fault only report what they were told.
        cause, at_fault = min(failed, key=lambda f: (f[1] != self.island, f[1] is None))
        if at_fault is not None and at_fault != self.island:
            self.rejections.add(at_fault, "payload", cause)
        return ReduceResult(means, None, cause, at_fault)

    def drop(self) -> None:
        """Leave the transport group of an attempt that did not commit. Every rank calls it."""
        self.event_loop.run(self.attempts.drop())

    def _find_fault(self, failure: OuterError | None) -> str | None:
        if isinstance(failure, PoisonError | StalledError):
            return failure.peer
        is_own = failure is not None and not isinstance(failure, TransportError)
        return self.island if is_own else None
