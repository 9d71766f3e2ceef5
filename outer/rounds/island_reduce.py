"""The reduce of one attempt on all ranks of an island, and the cause of the island's no vote if
it fails.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import torch

from outer.agreement.messages import Plan
from outer.audits.distrust import Distrust
from outer.errors import (
    AuditError,
    DeadlineError,
    OuterError,
    PoisonError,
    StalledError,
    TransportError,
)
from outer.merges.bound import LEAST_PARTICIPANTS, RecentLengths, scale_to
from outer.merges.geometry import dot, sum_of_squares
from outer.network.event_loop import EventLoop
from outer.network.rejections import Rejections
from outer.reduce.assignment import Assignment
from outer.reduce.attempt import Attempts
from outer.reduce.payloads import Mean
from outer.state.replica import Replica
from outer.transfer.donor import Donor

log = logging.getLogger(__name__)

ASK_THE_OPERATOR = (
    "With two islands it cannot be told which of them is wrong, so nothing is committed. Compare "
    "their losses: restart "
    "the one whose loss has blown up, or put its name into the file 'banned' of the other's folder"
)


@dataclass(frozen=True)
class ReduceResult:
    """One rank's means, and the result of the reduce on all ranks of the island, which is the
    same on each.
    """

    means: dict[int, Mean]
    """Means of the parts that this rank carries, by part, each with the digest of the part after
    a commit."""
    cause: str | None = None
    """The reason why the reduce failed on one of the ranks; None if it succeeded."""
    at_fault: str | None = None
    """The island whose payload, mean or pseudo-gradient could not be used; None if the network
    failed.
    """
    _: KW_ONLY
    num_audited: int = 0
    """Number of parts that all ranks of the island have audited."""
    norm: float = 0.0
    """L2 norm of the pseudo-gradient over all ranks of the island, without moments; 0 if the island
    observed.
    """
    mean_norm: float | None = None
    """L2 norm of the mean over all ranks of the island, without moments; None if there is no
    mean."""
    cosine: float | None = None
    """Cosine of the angle between the island's pseudo-gradient and the mean; None if one of them is
    0 or missing.
    """
    is_stalled: bool = False
    """Whether the reduce took too long on a rank that cannot identify a single island as the
    cause."""
    waits_for_means: bool = False
    """Whether only means of `at_fault` came too late. That island may itself be waiting for
    others."""


@dataclass
class IslandReduce:
    """The reduces of one rank. Every rank of the island builds it and calls `run` together, with
    the same plan.
    """

    island: str
    replica: Replica
    attempts: Attempts
    event_loop: EventLoop
    rejections: Rejections
    donor: Donor
    """Donor of this island's state, which serves fewer parts at once while a reduce runs."""
    recent: RecentLengths
    distrust: Distrust = field(default_factory=Distrust)
    _own: tuple[int, dict[str, float]] = (0, {})
    """What the last attempt sent (`Space.content_of`), and the contribution's L2 norms by kind."""
    _asked: tuple[int, str] | None = None
    """The round, and the island, for which the operator's decision was last requested in the
    log."""

    def run(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> ReduceResult:
        """Reduce this rank's parts; `pseudo_grads` is empty if the island observes. Never raises
        for a failed reduce.
        """
        if refused := self.distrust.find(plan):
            return ReduceResult({}, refused[1], at_fault=refused[0])
        means = {}
        failure = None
        squares = dict[str, float]()
        self._begin(plan, pseudo_grads)
        products: dict[int, tuple[float, float]] = {}

        def look_at(part: int, mean: torch.Tensor, num_given: int) -> bytes:
            products[part] = self._products(part, mean, pseudo_grads.get(part))
            return self.replica.carried.digest_after(part, mean, num_given)

        self.donor.is_busy = True
        try:
            reduce = self.event_loop.start(self.attempts.run(plan, pseudo_grads, look_at))
            squares = self.replica.squares(pseudo_grads)  # while the first payloads are being sent
            means = self.event_loop.wait_for(reduce)
        except OuterError as error:
            log.info("round %d attempt %d failed here: %s", plan.round, plan.attempt, error)
            failure = error
        finally:
            self.donor.is_busy = False
        ranks = self.replica.ranks.background
        total = add_products([products[part] for part in sorted(products)])
        longest = max(((products[part][0], part) for part in products), default=(0.0, 0))
        found = replace(self._outcome(failure), squares=squares, products=total, longest=longest)
        outcomes = ranks.gather(found)
        own = lengths_of([outcome.squares for outcome in outcomes])
        norm = own.get("params", 0.0)
        self._own = (self._own[0], self._scale(plan, own))
        num_audited = sum(outcome.num_audited for outcome in outcomes)
        if all(outcome.cause is None for outcome in outcomes):
            mean_norm, cosine = compare_with_mean(norm, [outcome.products for outcome in outcomes])
            if refused := self._find_too_long(
                plan, mean_norm, max(outcome.longest for outcome in outcomes)
            ):
                return ReduceResult(
                    means, *refused, num_audited=num_audited, norm=norm, mean_norm=mean_norm
                )
            return ReduceResult(
                means, num_audited=num_audited, norm=norm, mean_norm=mean_norm, cosine=cosine
            )
        return self._find_fault(
            plan, outcomes, ReduceResult(means, num_audited=num_audited, norm=norm)
        )

    def _find_fault(
        self, plan: Plan, outcomes: Sequence["_Outcome"], result: ReduceResult
    ) -> ReduceResult:
        """Return the result of an attempt that failed on some ranks, with the cause and the
        island at fault.
        """
        failed = [outcome for outcome in outcomes if outcome.cause is not None]
        # This island's own fault comes first, then a peer's: ranks without a fault only repeat what
        # others reported.
        worst = min(failed, key=lambda o: o.rank_of_fault(self.island))
        if worst.at_fault is not None and worst.at_fault != self.island:
            self.rejections.add(
                worst.at_fault, "mean" if worst.is_audit else "payload", worst.cause or ""
            )
            if worst.is_audit:
                log.warning("round %d attempt %d: %s", plan.round, plan.attempt, worst.cause)
                self.distrust.note(plan.round, worst.at_fault, is_wrong=worst.is_wrong_mean)
        return replace(
            result,
            cause=worst.cause or "",
            at_fault=worst.at_fault,
            is_stalled=worst.at_fault is None and any(outcome.is_stalled for outcome in outcomes),
            waits_for_means=worst.waits_for_means,
        )

    def _begin(self, plan: Plan, pseudo_grads: Mapping[int, torch.Tensor]) -> None:
        """Set the bound above which reducers refuse payloads in this attempt. Every rank calls
        it together.
        """
        replica = self.replica
        fragment = self.replica.space.content_of(plan.round)
        own = dict[str, float]()
        kinds = {
            replica.space.part_groups[group].kind
            for group in replica.space.part_groups_in(plan.round)
        }
        if not self.recent.knows(fragment, kinds):
            own = self._scale(
                plan, lengths_of(replica.ranks.background.gather(replica.squares(pseudo_grads)))
            )
        self._own = fragment, own
        self.attempts.reducer.filters.bound = self.recent.bound(fragment, own)

    def _scale(self, plan: Plan, own: Mapping[str, float]) -> dict[str, float]:
        """Return the L2 norms of this island's contribution. The norms of params and buffers are
        scaled to the number of tokens of other contributors: both may begin at 0 and grow by the
        step.
        """
        scale = scale_to({p.island: p.weight for p in plan.contributors}, self.island)
        return {
            kind: length * scale if kind in ("params", "buffer") else length
            for kind, length in own.items()
        }

    def _find_too_long(
        self, plan: Plan, mean_norm: float, longest: tuple[float, int]
    ) -> tuple[str, str | None] | None:
        """Return why the mean must not be committed, and the island at fault if it is known; None
        if the mean may be committed.

        `longest`: the squared norm of the longest part of the mean, and the index of that part.
        """
        contributors = [p.island for p in plan.contributors]
        limit = self.recent.bound(*self._own).limit("params")
        length = longest[0] ** 0.5
        part = longest[1]
        if mean_norm <= limit or contributors == [self.island]:
            return None
        cause = (
            f"the mean of round {plan.round} has a norm of {mean_norm:.3g}, and by this island's "
            "pseudo-gradients, now "
            f"and of late, {limit:.3g} is the most (outer.merge.refuse_norm_ratio)"
        )
        if len(contributors) < LEAST_PARTICIPANTS:
            suspect = next(name for name in contributors if name != self.island)
            own = self._own[1].get("params", 0.0)
            cause += (
                f". This island has contributed {own:.3g}, and the rest comes from "
                f"{suspect!r}. {ASK_THE_OPERATOR}"
            )
            if self._asked != (plan.round, suspect):
                log.warning("%s", cause)
            self._asked = plan.round, suspect
            return cause, None
        reducer = Assignment(plan).reducer_of(part)
        return cause, reducer if length > limit and reducer != self.island else None

    def _products(
        self, part: int, mean: torch.Tensor, pseudo_grad: torch.Tensor | None
    ) -> tuple[float, float]:
        """Return the squared norm of a part's mean, and its scalar product with the
        pseudo-gradient; 0 for moments and buffers.

        It is called on several threads while other parts are still being received.
        """
        if self.replica.space.parts[part].is_replaced:
            return 0.0, 0.0
        return sum_of_squares(mean), 0.0 if pseudo_grad is None else dot(mean, pseudo_grad)

    def commit(self, round_number: int, means: Mapping[int, Mean]) -> None:
        """Remember what later rounds need of the last attempt, which has been committed. Every
        rank calls it.
        """
        self.attempts.reducer.commit(round_number, means)
        self.recent.commit(*self._own)

    def forget(self) -> None:
        """Drop the data that rounds since an earlier state have left, because the run goes back
        to that state. Every rank calls it.
        """
        self.attempts.reducer.forget()
        self.recent.forget()

    def dispute(self, plan: Plan) -> None:
        """Participants of the plan have found different means. Every rank calls it."""
        self.event_loop.call(lambda: self.attempts.dispute(plan))

    def drop(self) -> None:
        """Leave the transport group of an attempt that did not commit. Every rank calls it."""
        self.event_loop.run(self.attempts.drop())

    def _outcome(self, failure: OuterError | None) -> "_Outcome":
        cause = None if failure is None else str(failure)
        num_audited = self.attempts.num_audited
        if isinstance(failure, AuditError):
            return _Outcome(
                num_audited, cause, failure.peer, is_audit=True, is_wrong_mean=failure.is_wrong
            )
        if isinstance(failure, StalledError):
            return _Outcome(num_audited, cause, failure.peer, waits_for_means=failure.of_means)
        if isinstance(failure, PoisonError):
            return _Outcome(num_audited, cause, failure.peer)
        is_own = failure is not None and not isinstance(failure, TransportError)
        is_stalled = isinstance(failure, DeadlineError)
        return _Outcome(num_audited, cause, self.island if is_own else None, is_stalled=is_stalled)


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a reduce on one rank, which it sends to the other ranks of its island."""

    num_audited: int
    cause: str | None
    """The reason why the reduce failed on this rank, or None."""
    at_fault: str | None
    is_audit: bool = False
    """Whether an audit found `at_fault` to be at fault."""
    is_wrong_mean: bool = False
    is_stalled: bool = False
    """Whether the reduce took too long and no single island is the cause."""
    waits_for_means: bool = False
    """Whether only means of `at_fault` came too late."""
    squares: dict[str, float] = field(default_factory=dict)
    """The squared L2 norm of this rank's pseudo-gradient, by kind."""
    products: tuple[float, float] = (0.0, 0.0)
    """The sums over this rank's parts of the results of `IslandReduce._products`."""
    longest: tuple[float, int] = (0.0, 0)
    """The squared norm of this rank's longest part of the mean, and the index of that part."""

    def rank_of_fault(self, island: str) -> tuple[bool, ...]:
        """Return a sort key among the failed ranks of an island: the lowest key has the most
        certain cause.
        """
        return (
            self.at_fault != island,
            self.at_fault is None,
            not self.is_wrong_mean,
            self.waits_for_means,
        )


def lengths_of(squares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the L2 norms by kind over all ranks, from the squared norms of each rank."""
    kinds = dict.fromkeys(kind for each in squares for kind in each)
    return {kind: sum(each.get(kind, 0.0) for each in squares) ** 0.5 for kind in kinds}


def add_products(products: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the sums of the results of `IslandReduce._products`, over parts or over ranks."""
    return sum(squares for squares, _ in products), sum(each for _, each in products)


def compare_with_mean(
    norm: float, products: Sequence[tuple[float, float]]
) -> tuple[float, float | None]:
    """Return the norm of the mean, and its cosine with a pseudo-gradient of this norm, from the
    ranks' `products`.

    >>> compare_with_mean(5.0, [(4.0, 6.0), (0.0, 0.0)])
    (2.0, 0.6)
    """
    squares, product = add_products(products)
    mean_norm = squares**0.5
    scale = norm * mean_norm
    return mean_norm, product / scale if scale > 0 and math.isfinite(scale) else None
