"""One round on one rank, from a snapshot of its pseudo-gradient to the commit of the global params.

    plan -> reduce -> vote -> commit: outer step on the global params
     ^________________|  abort: nothing has changed, next attempt

Local params do not change, so a round may run in a background thread while they are trained. It
uses the background rank group to communicate with the island's other ranks.
"""

from dataclasses import dataclass, replace
from functools import partial

from outer.agreement.messages import Plan, Ready, Vote
from outer.errors import BehindError, OuterError
from outer.hooks import Hooks
from outer.identity.known_names import KnownNames
from outer.leases.cursor import LeaseCursor
from outer.leases.ledger import settle
from outer.merges.base import weights_of
from outer.network.messages import do_shared, parse
from outer.report import RoundReport
from outer.rounds.island_reduce import IslandReduce, ReduceResult
from outer.rounds.leader import Leader
from outer.rounds.pace import Pace
from outer.rounds.traffic_meter import TrafficMeter
from outer.space.digest import state_digest
from outer.space.ranks import RankGroup
from outer.state.earlier import EarlierState
from outer.state.part_state import Position
from outer.state.pseudo_gradient import Contribution, Snapshot
from outer.state.replica import Replica


@dataclass
class RoundRunner:
    """Runs the rounds of one rank. Every rank of the island builds it and makes the same calls."""

    island: str
    replica: Replica
    cursor: LeaseCursor
    pace: Pace
    reduce: IslandReduce
    leader: Leader | None
    """The island's leader, on rank 0 only."""
    names: KnownNames
    hooks: Hooks
    traffic: TrafficMeter
    share: float
    """This island's weight in the last mean; an equal share before the first mean."""

    def attempt(self, contribution: Contribution) -> RoundReport:
        """Make one attempt at the next round and report it. If it does not commit, nothing has
        changed on any island: call it again.

        Raises BehindError when others have committed without this island; OuterError when its own
        pseudo-gradient cannot be used, or too few islands join.
        """
        started = self._now()
        plan = self._plan(contribution)
        if plan.earlier is not None:
            return self._go_back(plan, plan.earlier, contribution, started)
        planned = self._now()
        num_freezes = self.pace.deadlines.num_freezes
        snapshot = self._find_contribution(plan, contribution)
        result = self.reduce.run(plan, {} if snapshot is None else snapshot.pseudo_grads)
        reduced = self._now()
        position = self._position_after(plan)
        digest = (
            None if result.cause is not None else self.replica.digest_after(result.means, position)
        )
        is_committed, cause = self._ranks.on_leader(lambda: self._decide(plan, result, digest))
        if is_committed:
            self.pace.deadlines.observe("reduce", reduced - planned, num_freezes)
            self._commit(plan, result, position, observes=snapshot is None)
            self.update_status(is_coming=True, included=[p.incarnation for p in plan.contributors])
        else:
            self.reduce.drop()
            if self._ranks.on_leader(lambda: self._leader.has_dispute(plan)):
                self.reduce.dispute(plan)
        if result.at_fault == self.island:
            raise OuterError(result.cause or "")
        report = self._report(plan, snapshot, cause, is_committed=is_committed)
        return replace(
            report,
            reduce_seconds=reduced - planned,
            wait_seconds=planned - started,
            pseudo_grad_norm=result.norm,
            mean_norm=result.mean_norm,
            mean_cosine=result.cosine,
            gated=dict(self.reduce.attempts.reducer.filtered),
            audited=result.num_audited,
        )

    def contribute(self, contribution: Contribution) -> None:
        """Announce that the contribution to the current round has been filled. Only the leader
        sends it.
        """
        if self.leader is not None:
            self.leader.contribute(lambda: self._build_ready(contribution))

    def update_status(self, *, is_coming: bool, included: list[str] | None = None) -> None:
        """Send the others this island's status. With `included`, also serve the new state as a
        donor.
        """
        if self.leader is not None:
            if included is not None:
                self.leader.serve_state(included)
            self.leader.update_status(is_coming=is_coming, step_seconds=self.pace.step_seconds)

    # -- step by step ------------------------------------------------------------------------------

    def _plan(self, contribution: Contribution) -> Plan:
        """Return the plan, on every rank."""
        self.hooks.reached("plan", self.replica.position.round)
        body, donors, cause = self._ranks.on_leader(lambda: self._plan_on_leader(contribution))
        if body is not None:
            plan = parse(Plan, body)
            # The leader has connected to the participants' leaders, so it knows the keys that own
            # their names.
            self.names.adopt(self._ranks.on_leader(lambda: self.names.keys_of(plan.names)))
            return plan
        raise OuterError(cause) if donors is None else BehindError(donors, cause)

    def _plan_on_leader(
        self, contribution: Contribution
    ) -> tuple[bytes | None, tuple[str, ...] | None, str]:
        """Return (plan, None, ""), or (None, donors, why) when behind, or (None, None, why) when
        there is no plan.
        """
        on_sent = partial(self.hooks.reached, "planning")
        try:
            plan = self._leader.plan(lambda: self._build_ready(contribution), on_sent)
            return plan.encode(), None, ""
        except BehindError as behind:
            return None, behind.donors, behind.cause
        except OuterError as error:
            return None, None, str(error)

    def _build_ready(self, contribution: Contribution) -> Ready:
        position = self.replica.position
        snapshot = contribution.find(position.round)
        first_unit = self.cursor.first_unit(position.ledger)
        epoch = self.reduce.attempts.offered_epoch
        earlier = contribution.offered
        return self._leader.build_ready(
            snapshot, first_unit, epoch, self.pace.step_seconds, earlier
        )

    def _find_contribution(self, plan: Plan, contribution: Contribution) -> Snapshot | None:
        """Return this rank's snapshot if the plan counts the island as a contributor, even if a
        later one was filled in.
        """
        if self.island not in [p.island for p in plan.contributors]:
            return None
        return contribution.wait(plan.round, self.pace.deadlines.limit("reduce"))

    def _position_after(self, plan: Plan) -> Position:
        """Return the run's position after a commit of the plan."""
        before = self.replica.position
        tokens = before.tokens + sum(p.tokens for p in plan.participants)
        # The plan names the digest of the state before it, which covers the ledger, so the result
        # may be shared.
        name = "settle", plan.id, self.replica.terms
        num_rounds = plan.round + 1
        terms = self.replica.terms
        ledger = do_shared(
            name, lambda: settle(before.ledger, plan.participants, terms, num_rounds, tokens)
        )
        return Position(round=num_rounds, tokens=tokens, ledger=ledger)

    def _go_back(
        self, plan: Plan, parts_digest: str, contribution: Contribution, started: float
    ) -> RoundReport:
        """Commit the earlier state that more than half of the participants name. Nothing is
        averaged.

        The position is a new one, so text that was read since then is not read again, and an island
        that missed the commit finds a newer state. No participant's progress counts, that of
        observers neither. A participant that lacks the earlier state votes with its digest alone,
        and raises BehindError after the commit, to take the state from the others.
        """
        planned = self._now()
        position = self._position_after(plan)
        vote = Vote.yes(plan, self.island, state_digest(parts_digest, position.ledger.text))
        is_committed, cause = self._ranks.on_leader(lambda: self._cast(plan, vote))
        earlier = self._find_earlier(plan, parts_digest, contribution)
        if is_committed and earlier is None:
            donors = tuple(p.island for p in plan.participants if p.earlier == parts_digest)
            raise BehindError(
                donors,
                f"{', '.join(donors)} went back to an earlier state, which this island lacks",
            )
        if is_committed and earlier is not None:
            self.hooks.reached("apply", plan.round)
            self.replica.go_back(earlier.parts, position)
            self.reduce.forget()
            self.update_status(is_coming=True, included=[p.incarnation for p in plan.participants])
        report = self._report(
            plan, self._find_contribution(plan, contribution), cause, is_committed=is_committed
        )
        return replace(
            report,
            wait_seconds=planned - started,
            earlier=None if earlier is None else earlier.round,
        )

    def _find_earlier(
        self, plan: Plan, parts_digest: str, contribution: Contribution
    ) -> EarlierState | None:
        """Return the state to which the plan goes back, or None if a rank of this island lacks
        it.
        """
        if self.island not in [p.island for p in plan.participants if p.earlier == parts_digest]:
            return None
        earlier = contribution.wait_for_earlier(parts_digest, self.pace.deadlines.limit("reduce"))
        return earlier if all(self._ranks.gather(earlier is not None)) else None

    def _report(
        self, plan: Plan, snapshot: Snapshot | None, cause: str, *, is_committed: bool
    ) -> RoundReport:
        """Return the report of an attempt. `cause`: the reason why it does not commit. Every
        rank calls it together.
        """
        sent, received = self.traffic.count()
        return RoundReport(
            round=plan.round,
            attempt=plan.attempt,
            participants=plan.names,
            planner=plan.planner,
            is_committed=is_committed,
            digest=self.replica.digest,
            base=plan.participants[0].digest,
            units=() if snapshot is None else snapshot.units,
            bytes_sent=sent,
            bytes_received=received,
            reduce_seconds=0.0,
            wait_seconds=0.0,
            pseudo_grad_norm=0.0,
            signers=self._count_signers() if is_committed else 0,
            listeners=[p.island for p in plan.participants if p.listens],
            gated={},
            cause=cause,
            loss_scale=plan.loss_scale,
        )

    def _decide(self, plan: Plan, result: ReduceResult, digest: str | None) -> tuple[bool, str]:
        """Return whether the attempt commits, and why it does not. `digest`: digest of the
        resulting state. Leader only.
        """
        if digest is not None:
            vote = Vote.yes(plan, self.island, digest)
        else:
            accused = result.at_fault if result.at_fault != self.island else None
            vote = Vote.no(
                plan,
                self.island,
                result.cause or "",
                accused,
                waits_for_means=result.waits_for_means,
                is_stalled=result.is_stalled,
            )
        is_committed, cause = self._cast(plan, vote)
        return is_committed, "" if is_committed else result.cause or cause

    def _cast(self, plan: Plan, vote: Vote) -> tuple[bool, str]:
        """Cast the island's vote. Return whether the attempt commits, and why it does not.
        Leader only.
        """
        self.hooks.reached("vote", plan.round)
        on_sent = partial(self.hooks.reached, "decide", plan.round)
        if self._leader.decide(vote, on_sent):
            return True, ""
        cause, suspects = self._leader.explain_abort(plan)
        for island, why in suspects.items():
            if island != self.island:
                self.reduce.rejections.add(island, "attempt", why)
        return False, cause

    def _commit(
        self, plan: Plan, result: ReduceResult, position: Position, *, observes: bool
    ) -> None:
        """Make the round permanent on this rank. Only this method changes state, in this order:

        replica.commit   outer step on the carried global params, new position and digest
        reduce.commit    what later rounds need: error feedback, norms of the filters and of the
                         bound, last means
        share, pace      this island's weight; step times of all participants
        """
        self.hooks.reached("apply", plan.round)
        self.replica.commit(result.means, position, len(plan.contributors), observes=observes)
        self.reduce.commit(plan.round, result.means)
        shares = weights_of([p.weight for p in plan.participants])
        self.share = shares[plan.names.index(self.island)]
        self.pace.observe_commit(plan, self._now())

    def _count_signers(self) -> int:
        """Return the number of signatures under the committed state, by the leader's
        certificate.
        """
        certificate = None if self.leader is None else self.leader.proof.certificate
        return 0 if certificate is None else len(certificate.signatures)

    def _now(self) -> float:
        return self.reduce.event_loop.time()

    @property
    def _ranks(self) -> RankGroup:
        return self.replica.ranks.background

    @property
    def _leader(self) -> Leader:
        assert self.leader is not None, "only the leader sends messages for the island"
        return self.leader
