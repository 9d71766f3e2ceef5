"""The round protocol of one island as a state machine: messages in, messages out; no sockets,
clocks or tasks.

In every attempt at a round an island passes through these states (docs/protocol.md draws their
transitions):

    training    the inner steps are running, or the island takes another island's state
    gathering   the island is ready and waits for a plan (planner.py)
    reducing    a plan is fixed and the participants compute the mean of their pseudo-gradients
    voting      the participants exchange votes; the attempt commits on every participant or changes
                nothing

The driver (running/driver.py) passes peers' messages to `receive`, reports time-outs as `is_late`,
and sends the `outbox`. The tables of an island are in knowledge.py, votes.py and suspicions.py.
tests/outer/explore.py searches every order of messages, losses, crashes, freezes and time-outs of a
few islands.

A committed round is the same on every island, because an island commits a plan only in two cases:
all participants have voted yes with the same digest and have acknowledged this island's vote, or
one participant shows the signed yes votes of all. An island that misses a vote or a receipt queries
all participants it can reach. An island that is queried before it has committed no longer commits
on votes alone: it must query the others as well. So while islands only crash, either all survivors
commit a plan or none does, and a frozen island has committed only what the others commit.

When a partition or a false alarm lets two histories grow, the one with the higher `Status.rank`
survives, and the islands of the other history take its state, if enough islands support it
(proofs/claims.py).
"""

from outer.agreement.coordination import PlanNotice, PlanQuery, is_passed_on
from outer.agreement.messages import (
    Goodbye,
    Outcome,
    OutcomeQuery,
    OutcomeReply,
    Plan,
    Ready,
    Settled,
    Status,
    Vote,
    VoteList,
    VoteReceipt,
)
from outer.agreement.planner import GiveUp, Hopeless, TooFew
from outer.agreement.proofs.certificate import Proof, ProofQuery
from outer.agreement.round_state import RoundState
from outer.agreement.rules import MAX_AHEAD, Behind, find_objection
from outer.agreement.suspicions import MAX_AMNESTIES, explain_accusations
from outer.errors import MessageError
from outer.network.messages import Message


class RoundProtocol(RoundState):
    """The protocol on one island."""

    # -- the island's own actions ------------------------------------------------------------------
    def update_status(self, status: Status) -> None:
        """Enter the training state with a new committed state, from a commit or from donors."""
        if (status.round, status.digest) != (
            self.knowledge.status.round,
            self.knowledge.status.digest,
        ):
            outcome = self.vote_table.outcomes.get(self.plan.id) if self.plan else None
            committed = self.plan if self.plan and outcome == (self.plan.round, "commit") else None
            self.suspicions.begin_round(
                status.round, committed.names if committed else (), self.vote_table.votes
            )
            self.coordination.begin_round(status.round, committed, self.knowledge.rules)
            self.knowledge.add(self.coordination.crew)
            self.knowledge.presume(self.coordination.crew, status)
        self.knowledge.hold(status)
        self.state = "training"
        self.own = None
        self.exchange.end()
        self.passing.end()
        self.vote_table.prune(status.round)

    def prepare(self, own: Ready) -> None:
        """Start to gather, as a contributor or as an observer that still trains. `own.attempt`
        must be `next_attempt`.
        """
        assert own.status.rank == self.knowledge.status.rank, (
            "a ready for another state than this island's"
        )
        self.state = "gathering"
        self.own = own
        self.exchange.end()
        self.knowledge.status = own.status
        self.knowledge.reported = frozenset()
        if own.attempt > 0:
            self.coordination.turn_direct()
        self.meet(own)
        self.send_ready(own)

    def contribute(self, own: Ready) -> None:
        """Change from an observer to a contributor of this gathering. Has no effect once the
        plan is fixed.
        """
        if (
            self.state == "gathering"
            and self.plan is None
            and self.own is not None
            and self.own.round == own.round
        ):
            self.own = own.model_copy(update={"attempt": self.own.attempt})
            self.send_ready(self.own)

    def try_plan(
        self, *, is_late: bool, is_patient: bool = False
    ) -> Plan | Behind | TooFew | GiveUp | None:
        """Return the plan in which to take part, a reason against planning, or None to wait. Call
        it while gathering.

        The arguments are as in `Gathering.decide`. After `Behind` the island refuses all plans
        until `prepare`.
        """
        if self.plan is not None:
            return self.plan
        if cause := self.suspicions.find_end(self.knowledge, self.vote_table.votes):
            return GiveUp(cause)
        if self.coordination.is_led:
            return self._wait_for_coordinator(is_late=is_late)
        decision = self.gathering.decide(is_late=is_late, is_patient=is_patient)
        if isinstance(decision, Hopeless):
            is_last = self.suspicions.num_amnesties >= MAX_AMNESTIES
            if is_last and decision.is_everyone:
                return GiveUp(explain_accusations(self.knowledge.status.round, decision.reasons))
            if not is_last or is_late:
                self.suspicions.forgive()
                decision = self.gathering.decide(is_late=is_late, is_patient=is_patient)
        if isinstance(decision, Behind):
            self.stop_gathering()
        elif isinstance(decision, Plan):
            self._accept(decision)
            if is_passed_on(decision, self.knowledge.rules):
                self.send(self.others, PlanNotice(plan=decision.id, round=decision.round))
            self.pass_on(decision)
        return None if isinstance(decision, Hopeless) else decision

    def _wait_for_coordinator(self, *, is_late: bool) -> Behind | None:
        """Return the result of `try_plan` while another island collects the ready messages."""
        if behind := self.knowledge.behind(is_settled=False):
            self.stop_gathering()
        elif is_late:
            self.give_up_coordinator()
        elif self.knowledge.is_held_up:
            self.coordination.hold_up()
            self.write_to_all()
        return behind

    def pass_over(self, *, is_late: bool) -> str | None:
        """Stop waiting for the plan of the island that should make it. Return its name if it is
        another island.
        """
        planner = self.gathering.find_planner(is_late=is_late)
        if planner in (None, self.knowledge.me):
            return None
        self.give_up_coordinator()
        self.suspicions.passed_over |= {planner}
        if self.knowledge.me in self.gathering.excluded:
            # The others may suspect too many, too: they do not plan without this island.
            self.suspicions.forgive()
        return planner

    def vote(self, vote: Vote) -> None:
        """Cast this island's vote on the plan: yes with the state that a commit leads to, or no
        with a cause.
        """
        self.state = "voting"
        self.exchange.vote(vote, self.vote_table, self.knowledge)
        self.send_votes()

    def conclude(self, *, is_late: bool, is_over: bool = False, is_slow: bool = False) -> Outcome:
        """Return the outcome of the plan, "open" while it is not known. `is_late`: missing votes
        are no longer waited for.

        `is_over`: missing replies to this island's query are no longer waited for, so the outcome
        is decided. `is_slow`: the planner's time to forward the votes is over. It becomes true
        before `is_late`.
        """
        assert self.plan is not None, "an island concludes the plan it takes part in"
        reachable = self.others - self.knowledge.lost
        silent = self.vote_table.pending(self.plan) & reachable
        times = {"is_late": is_late, "is_over": is_over, "is_slow": is_slow}
        outcome = self.exchange.conclude(self.vote_table, self.knowledge, **times)
        self.send_votes()
        if is_late and outcome == "abort":
            self.suspicions.silent[self.plan.id] = silent
        if outcome == "commit":
            self._expect_earlier(self.plan)
        if outcome != "open":
            self.state = "training"
            self.own = None
        return outcome

    def resend(self) -> None:
        """Send every message of the current state that may have been lost again. Call it each
        second.
        """
        for planner, query in self.passing.find_missing(self.knowledge.status.round):
            self.send([planner], query)
        if self.state == "gathering" and self.own is not None:
            self.meet(self.own)
            self.send_ready(self.own)
        if self.state == "voting":
            self.exchange.repeat(self.vote_table, self.knowledge)
            self.send_votes()

    # -- islands come, go and fail -----------------------------------------------------------------
    def remove(self, island: str) -> None:
        """Record that an island has left the run. Unlike a lost island it cannot have aborted
        the plan on its own.
        """
        self.knowledge.forget(island)
        self.coordination.leave(island)
        self.readies.latest.pop(island, None)
        if island in self.others:
            self.knowledge.lost |= {island}  # The open plan no longer waits for its vote.

    def mark_lost(self, island: str) -> None:
        """Record that an island does not answer or that its connection broke."""
        self.knowledge.lost |= {island}
        if island == self.coordination.coordinator:
            self.write_to_all()
        if island in self.others:
            self.require_query()

    # -- messages from peers -----------------------------------------------------------------------
    def receive(self, sender: str, message: Message) -> Message | None:
        """Process a message and return the reply, if there is one. Raises MessageError for
        impossible claims.
        """
        if isinstance(message, Goodbye):
            self._check_sender(sender, message.island)
            self.remove(sender)
            return None
        self.knowledge.hear(sender)
        match message:
            case Ready():
                return self._receive_ready(sender, message)
            case Status():
                return self._receive_status(sender, message)
            case Plan():
                self._receive_plan(sender, message)
            case PlanNotice():
                if plan := self.passing.hear(sender, message):
                    self._receive_plan(plan.planner, plan)
            case PlanQuery():
                self.answer_plan_query(sender, message)
            case Vote():
                self._check_sender(sender, message.island)
                is_own_plan = message.plan in self.suspicions.plans
                return self.vote_table.answer_vote(
                    message, self.knowledge, self.plan, is_own_plan=is_own_plan
                )
            case VoteList() | Settled():
                has_voted = self.state == "voting"
                reply = self.exchange.receive(
                    sender, message, self.vote_table, self.knowledge, has_voted=has_voted
                )
                self.send_votes()
                return reply
            case OutcomeQuery():
                participants = self.suspicions.plans.get(message.plan)
                return self.vote_table.answer_query(sender, message, self.knowledge, participants)
            case VoteReceipt() | OutcomeReply():
                if self.plan is not None and message.plan == self.plan.id:
                    self.vote_table.record(self.plan, sender, message, self.knowledge.signer.verify)
            case ProofQuery():
                return self.knowledge.claims.answer(message)
            case Proof():
                self.knowledge.receive_proof(sender, message)
        return None

    def _receive_ready(self, sender: str, ready: Ready) -> Status:
        self._check_sender(sender, ready.island)
        self.knowledge.check_ready(ready)
        number = self.knowledge.status.round
        self.readies.add(ready, (number, self.next_attempt))
        if self.own is not None and self.coordination.said is not None:
            self.coordination.compare(
                [self.knowledge.me, *self.readies.usable(number, self.knowledge.present)], number
            )
        return self._receive_status(sender, ready.status)

    def _receive_status(self, sender: str, status: Status) -> Status:
        self.knowledge.record(sender, status)
        if self.plan is None and (query := self.knowledge.ask_for_proof(sender)):
            self.send([sender], query)
        self._renew_ready(status)
        own = self.knowledge.status
        if not self.coordination.hear(sender, status, own.round):
            self.write_to_all()
        attempt = self.readies.next_attempt(sender, own.round)
        num_ready = (
            self.count_ready() if self.coordination.is_mine and status.round == own.round else 0
        )
        is_same = (attempt, num_ready) == (own.attempt, own.num_ready)
        return (
            own if is_same else own.model_copy(update={"attempt": attempt, "num_ready": num_ready})
        )

    def _renew_ready(self, status: Status) -> None:
        """Announce a later attempt if the peer has used this island's ready message in a plan
        that never arrived here.
        """
        own = self.own if self.state == "gathering" and not self.plan else None
        most = self.next_attempt + MAX_AHEAD
        if own is not None and status.round == own.round and own.attempt < status.attempt <= most:
            self.own = own.model_copy(update={"attempt": status.attempt})
            self.send_ready(self.own)

    def _receive_plan(self, sender: str, plan: Plan) -> None:
        if self.plan is not None and plan.id == self.plan.id:
            return
        if sender != plan.planner and is_passed_on(plan, self.knowledge.rules):
            if not self.passing.believes(plan):
                return  # The plan is kept until its planner announces it.
        else:
            self._check_sender(sender, plan.planner)
        self.suspicions.passed_over -= {plan.planner}
        self.pass_on(plan)
        if (cause := self._find_objection(plan)) is None:
            self._accept(plan)
        elif plan.id not in self.vote_table.outcomes:
            self._refuse(plan, cause)

    # -- plans -------------------------------------------------------------------------------------
    def _find_objection(self, plan: Plan) -> str | None:
        """Return the reason why this island takes no part in the plan, or None if it takes part."""
        if plan.id in self.vote_table.query_first or plan.id in self.vote_table.outcomes:
            return "this island has aborted it"
        if self.state != "gathering" or self.own is None or self.plan is not None:
            return f"{self.knowledge.me!r} is {self.state} in round {self.knowledge.status.round}"
        if self.gathering.is_out_of_turn(plan):
            return f"it is not {plan.planner!r}'s turn to take part"
        objection = find_objection(plan, self.own, self.knowledge.rules, self.next_attempt)
        return objection or self.knowledge.find_wrong_key(plan.participants)

    def _accept(self, plan: Plan) -> None:
        self.state = "reducing"
        self.exchange.begin(plan, self.knowledge.me, self.knowledge.rules)
        self.vote_table.drop_unsigned(plan, self.knowledge.signer.verify)
        self.readies.mark_used(plan)
        self.suspicions.take_part(plan)

    def _refuse(self, plan: Plan, cause: str) -> None:
        """Vote no, so that the other participants do not wait for this island."""
        self.vote_table.outcomes[plan.id] = (plan.round, "abort")
        if (
            plan.round == self.knowledge.status.round
            and plan.planner not in self.suspicions.left_out(plan.attempt)
        ):
            self.readies.mark_refused(plan, self.own)
        vote = Vote.no(plan, self.knowledge.me, cause)
        self.vote_table.add(vote)
        self.send(frozenset(plan.names) & (self.knowledge.present | {plan.planner}), vote)

    def _expect_earlier(self, plan: Plan) -> None:
        """Presume that the islands which named an earlier state hold it, if the plan goes back
        to it and this island lacks it.
        """
        holders = [p.island for p in plan.participants if p.earlier == plan.earlier]
        if plan.earlier is None or self.knowledge.me in holders:
            return
        statement = self.vote_table.certify(plan).statement
        status = Status(round=plan.round + 1, tokens=statement.tokens, digest=statement.digest)
        self.knowledge.presume(holders, status)

    def _check_sender(self, sender: str, claimed: str) -> None:
        if sender != claimed:
            raise MessageError(f"{sender!r} sends a message in the name of {claimed!r}")
