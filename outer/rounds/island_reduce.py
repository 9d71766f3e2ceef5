"""The reduce of one attempt on all ranks of an island, and what the island votes after it."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import torch

from outer.agreement.messages import Plan
from outer.audits.distrust import Distrust
from outer.errors import AuditError, DeadlineError, OuterError, PoisonError, StalledError, TransportError
from outer.network.event_loop import EventLoop
from outer.network.rejections import Rejections
from outer.reduce.attempt import Attempts
from outer.reduce.payloads import Mean
from outer.state.pseudo_gradient import dot, sum_of_squares
from outer.state.replica import Replica
from outer.transfer.donor import Donor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReduceResult:
    """One rank's means, and the verdict of all ranks of the island, the same on each."""

    means: dict[int, Mean]
    """By part that this rank carries, each with the digest of the part after a commit of it."""
    cause: str | None = None
    """Why the reduce failed on one of the ranks; None if it has not."""
    at_fault: str | None = None
    """The island whose payload, mean or pseudo-gradient could not be used; None if the network failed."""
    _: KW_ONLY
    num_audited: int = 0
    """Parts that all ranks of the island have audited."""
    norm: float = 0.0
    """L2 norm of the pseudo-gradient over all ranks of the island, without moments; 0 if the island observed."""
    mean_norm: float | None = None
    """The same of the mean; None if there is none."""
    cosine: float | None = None
    """Cosine of the angle between the island's pseudo-gradient and the mean; None if one of them is 0 or missing."""
    is_stalled: bool = False
    """Whether it took too long on a rank that cannot tell who held it up."""


@dataclass
class IslandReduce:
    """Every rank of the island builds it and calls `run` together, with the same plan."""

    island: str
    replica: Replica
    attempts: Attempts
    event_loop: EventLoop
    rejections: Rejections
    donor: Donor
    """Serves fewer parts at once while a reduce runs."""
    distrust: Distrust = field(default_factory=Distrust)

    def run(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> ReduceResult:
        """Reduce this rank's parts; empty `pseudo_grads` if the island observes. Never raises for a failed reduce."""
        if refused := self.distrust.find(plan):
            return ReduceResult({}, refused[1], at_fault=refused[0])
        means, failure, squares = {}, None, 0.0
        products: dict[int, tuple[float, float]] = {}

        def look_at(part: int, mean: torch.Tensor, num_given: int) -> bytes:
            products[part] = self._products(part, mean, pseudo_grads.get(part))
            return self.replica.carried.digest_after(part, mean, num_given)

        self.donor.is_busy = True
        try:
            reduce = self.event_loop.start(self.attempts.run(plan, pseudo_grads, look_at))
            squares = self.replica.sum_of_squares(pseudo_grads)  # while the first payloads are on their way
            means = self.event_loop.wait_for(reduce)
        except OuterError as error:
            log.info("round %d attempt %d failed here: %s", plan.round, plan.attempt, error)
            failure = error
        finally:
            self.donor.is_busy = False
        ranks = self.replica.ranks.background
        total = add_products([products[part] for part in sorted(products)])
        outcomes = ranks.gather(replace(self._outcome(failure), squares=squares, products=total))
        norm = sum(outcome.squares for outcome in outcomes) ** 0.5
        num_audited, failed = sum(o.num_audited for o in outcomes), [o for o in outcomes if o.cause is not None]
        if not failed:
            mean_norm, cosine = compare_with_mean(norm, [outcome.products for outcome in outcomes])
            return ReduceResult(means, num_audited=num_audited, norm=norm, mean_norm=mean_norm, cosine=cosine)
        # This island's own fault comes first, then a peer's: ranks without a fault only report what they were told.
        worst = min(failed, key=lambda o: (o.at_fault != self.island, o.at_fault is None, not o.is_wrong_mean))
        if worst.at_fault is not None and worst.at_fault != self.island:
            self.rejections.add(worst.at_fault, "mean" if worst.is_audit else "payload", worst.cause or "")
            if worst.is_audit:
                log.warning("round %d attempt %d: %s", plan.round, plan.attempt, worst.cause)
                self.distrust.note(plan.round, worst.at_fault, is_wrong=worst.is_wrong_mean)
        is_stalled = worst.at_fault is None and any(outcome.is_stalled for outcome in outcomes)
        return ReduceResult(
            means, worst.cause or "", worst.at_fault, num_audited=num_audited, norm=norm, is_stalled=is_stalled
        )

    def _products(self, part: int, mean: torch.Tensor, pseudo_grad: torch.Tensor | None) -> tuple[float, float]:
        """The squared norm of a part's mean, and its scalar product with the pseudo-gradient; 0 for parts of moments.

        Called while other parts are still on their way, on several threads.
        """
        if self.replica.space.parts[part].is_moment:
            return 0.0, 0.0
        return sum_of_squares(mean), 0.0 if pseudo_grad is None else dot(mean, pseudo_grad)

    def drop(self) -> None:
        """Leave the transport group of an attempt that did not commit. Every rank calls it."""
        self.event_loop.run(self.attempts.drop())

    def _outcome(self, failure: OuterError | None) -> "_Outcome":
        cause, num_audited = None if failure is None else str(failure), self.attempts.num_audited
        if isinstance(failure, AuditError):
            return _Outcome(num_audited, cause, failure.peer, is_audit=True, is_wrong_mean=failure.is_wrong)
        if isinstance(failure, PoisonError | StalledError):
            return _Outcome(num_audited, cause, failure.peer)
        is_own = failure is not None and not isinstance(failure, TransportError)
        is_stalled = isinstance(failure, DeadlineError)
        return _Outcome(num_audited, cause, self.island if is_own else None, is_stalled=is_stalled)


@dataclass(frozen=True)
class _Outcome:
    """What one rank tells the others of its island after a reduce."""

    num_audited: int
    cause: str | None
    """Why it failed here, or None."""
    at_fault: str | None
    is_audit: bool = False
    """Whether an audit has found `at_fault`."""
    is_wrong_mean: bool = False
    is_stalled: bool = False
    """Whether it took too long, and nobody alone has held it up."""
    squares: float = 0.0
    """The squared L2 norm of this rank's pseudo-gradient."""
    products: tuple[float, float] = (0.0, 0.0)
    """The sums over this rank's parts of what `IslandReduce._products` returns."""


def add_products(products: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The sums of what `IslandReduce._products` returns, over parts or over ranks."""
    return sum(squares for squares, _ in products), sum(each for _, each in products)


def compare_with_mean(norm: float, products: Sequence[tuple[float, float]]) -> tuple[float, float | None]:
    """Norm of the mean, and its cosine with a pseudo-gradient of this norm, from the `products` of all ranks.

    >>> compare_with_mean(5.0, [(4.0, 6.0), (0.0, 0.0)])
    (2.0, 0.6)
    """
    squares, product = add_products(products)
    mean_norm = squares**0.5
    scale = norm * mean_norm
    return mean_norm, product / scale if scale > 0 and math.isfinite(scale) else None
