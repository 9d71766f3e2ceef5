"""The round protocol of one island as a state machine: messages in, messages out. No sockets, no clocks, no tasks.

Its states are drawn in docs/protocol.md. The driver (agreement.py) delivers what peers say, tells when patience has
run out, and sends what is in `outbox`.

Why a committed round is the same everywhere. An island commits a plan when every participant has voted yes with one
digest and holds this island's vote, or when one says that it has committed it. Whoever misses that asks all
participants it reaches; who is asked and has not committed will not commit on votes alone any more, but asks in turn.
So while islands only crash, all survivors commit a plan or none does, and one that freezes has committed nothing that
they do not. When a partition or a false alarm lets two histories grow, the one with the higher rank (Standing.rank)
survives and the others take its state.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from outer.ballot import Ballot
from outer.errors import MessageError
from outer.readies import Readies
from outer.rounds import Answer, Goodbye, Heard, Message, Outcome, Plan, Question, Ready, Standing, Vote, no
from outer.verdicts import Behind, Rules, Short, check_ready, find_behind, find_short, is_early, objection

Phase = Literal["training", "gathering", "reducing", "voting"]
MAX_ISLANDS = 1024


@dataclass
class Protocol:
    """One island's side. Every value held is immutable, so that a copy of the tables is a copy of the state."""

    me: str
    rules: Rules
    standing: Standing
    phase: Phase = "training"
    own: Ready | None = None
    plan: Plan | None = None
    present: frozenset[str] = frozenset()
    """The other islands in the run, alive or not."""
    lost: frozenset[str] = frozenset()
    """Those that did not answer when last spoken to."""
    heard: frozenset[str] = frozenset()
    """Those whose standing is from the present gathering."""
    standings: dict[str, Standing] = field(default_factory=dict)
    readies: Readies = field(default_factory=Readies)
    ballot: Ballot = field(default_factory=Ballot)
    is_asking: bool = False
    outbox: list[tuple[str, Message]] = field(default_factory=list)

    # -- what the island does -----------------------------------------------------------------------------------
    def stand(self, standing: Standing) -> None:
        """This island holds another state now, by a commit or from donors."""
        self.standing = standing
        self.phase, self.own, self.plan, self.is_asking = "training", None, None, False
        self.ballot.forget(standing.round)

    def prepare(self, own: Ready) -> None:
        """The inner steps are done, or it listens while it makes them. `own.attempt` is `next_attempt`."""
        assert own.standing.rank == self.standing.rank, "a ready for another state than this island's"
        self.phase, self.own, self.plan, self.is_asking = "gathering", own, None, False
        self.standing = own.standing
        self.heard = frozenset()
        self._send(self.present, own)

    def give(self, own: Ready) -> None:
        """It listened, and its inner steps are done now; too late when the plan is fixed."""
        if self.phase == "gathering" and self.plan is None and self.own is not None and self.own.round == own.round:
            self.own = own.model_copy(update={"attempt": self.own.attempt})
            self._send(self.present, self.own)

    @property
    def next_attempt(self) -> int:
        """One more than every attempt at this round that this island has taken part in."""
        return self.readies.next_attempt(self.me, self.standing.round)

    def consider(self, *, is_late: bool, is_patient: bool = False) -> Plan | Behind | Short | None:
        """What to do in the gathering: take part in a plan, take a state, or (None) wait.

        `is_late`: the grace has run out; who is not ready is not waited for. `is_patient`: who listens may still give.
        """
        assert self.own is not None, "an island considers plans when it is ready"
        if self.plan is not None:
            return self.plan
        ready = self.readies.usable(self.own.round, self.present - self.lost) | {self.me: self.own}
        absent = self._absent(ready)
        if behind := self.behind(is_settled=is_late or not absent):
            self.phase, self.own = "training", None  # From now on it refuses plans.
            return behind
        shut_out = self.ballot.shut_out(self.standing.round) if self.present - self.lost else frozenset[str]()
        agreeing = {name: r for name, r in ready.items() if r.digest == self.own.digest and name not in shut_out}
        shut_out |= self.rules.refused([agreeing[name] for name in sorted(agreeing)]).keys()
        agreeing = {name: r for name, r in agreeing.items() if name not in shut_out}
        if self.me in shut_out:
            return None  # The others go on without this island; it takes their state then.
        if short := self._short(agreeing, is_late=is_late):
            return short
        if is_early(self.rules, agreeing.values(), is_patient=is_patient):
            return None
        planner = min(agreeing) if is_late else min(set(agreeing) | absent)
        if planner != self.me or (absent and not is_late):
            return None
        return self._offer(agreeing)

    def vote(self, vote: Vote) -> None:
        """Say what came of the reduce here."""
        assert self.plan is not None and vote.plan == self.plan.id, "an island votes on the plan it takes part in"
        self.phase = "voting"
        self.ballot.keep(vote)
        self._send(self.others, vote)

    def conclude(self, *, is_late: bool) -> Outcome:
        """What comes of the plan; open: not known yet. `is_late`: votes are not waited for any longer."""
        assert self.plan is not None, "an island concludes the plan it takes part in"
        outcome = self.ballot.tally(self.plan)
        if outcome == "abort":
            return self._settle(outcome)
        pending = self.ballot.pending(self.plan) & self.others - self.lost
        is_doubted = self.plan.id in self.ballot.pledged or self.ballot.is_aborted_elsewhere(self.plan)
        if pending and not is_doubted and not is_late:
            return "open"
        return self._settle(outcome) if outcome == "commit" and not pending and not is_doubted else self._ask()

    def repeat(self) -> None:
        """Say again what may have been lost on the way."""
        if self.phase == "gathering" and self.own is not None:
            self._send(self.present, self.own)
        if self.phase == "voting" and self.plan is not None:
            self._send(self.ballot.pending(self.plan), self.ballot.votes[self.plan.id, self.me])
            if self.is_asking:
                self._send(self._unanswered(), Question(plan=self.plan.id, round=self.plan.round))

    @property
    def others(self) -> frozenset[str]:
        """The other participants of the plan."""
        return frozenset(self.plan.names) - {self.me} if self.plan else frozenset()

    def behind(self, *, is_settled: bool) -> Behind | None:
        """Whether another history than this island's survives. `is_settled`: all who count have been heard."""
        return find_behind(self.me, self.standing, self.live, is_settled=is_settled)

    @property
    def live(self) -> dict[str, Standing]:
        """Where the other islands stand, as far as they are known to live."""
        return {name: s for name, s in self.standings.items() if name in self.present - self.lost}

    # -- what peers do ------------------------------------------------------------------------------------------
    def meet(self, islands: Iterable[str]) -> None:
        """These are in the run; whoever speaks is, too."""
        self.present |= frozenset(islands) - {self.me}

    def part(self, island: str) -> None:
        """This one has left the run. Unlike one that is lost, it has not given this island up: that casts no doubt."""
        self.present -= {island}
        # Its vote on an open plan is not waited for any longer.
        self.lost = self.lost | {island} if island in self.others else self.lost - {island}
        self.heard -= {island}
        self.readies.forget(island)
        self.standings.pop(island, None)

    def lose(self, island: str) -> None:
        """It does not answer, or its connection is gone."""
        self.lost |= {island}
        if island in self.others:
            self.doubt()

    def doubt(self) -> None:
        """The others may have given this island up: from now on it does not commit the open plan without asking."""
        if self.plan is not None and self.phase in ("reducing", "voting"):
            self.ballot.pledged[self.plan.id] = self.plan.round

    def hear(self, sender: str, message: Message) -> Message | None:
        """Take a message in; the reply, if it wants one. Raises MessageError when it claims what cannot be."""
        if isinstance(message, Goodbye):
            self._check_sender(sender, message.island)
            self.part(sender)
            return None
        if sender not in self.present and len(self.present) >= MAX_ISLANDS:
            raise MessageError(f"{self.me!r} knows of {MAX_ISLANDS} islands already")
        self.meet([sender])
        self.lost -= {sender}
        match message:
            case Ready():
                return self._hear_ready(sender, message)
            case Standing():
                return self._hear_standing(sender, message)
            case Plan():
                self._hear_plan(sender, message)
            case Vote():
                return self._hear_vote(sender, message)
            case Heard():
                if self.plan is not None and message.plan == self.plan.id:
                    self.ballot.heard[message.plan, sender] = message.outcome
            case Question():
                return self._hear_question(message)
            case Answer():
                if self.plan is not None and message.plan == self.plan.id:
                    self.ballot.answers[message.plan, sender] = message.outcome
        return None

    def _hear_ready(self, sender: str, ready: Ready) -> Standing:
        self._check_sender(sender, ready.island)
        check_ready(ready, self.rules)
        self.readies.keep(ready)
        return self._hear_standing(sender, ready.standing)

    def _hear_standing(self, sender: str, standing: Standing) -> Standing:
        if standing.round > self.rules.max_round:
            raise MessageError(f"{sender!r} claims round {standing.round}, the run has {self.rules.max_round}")
        self.standings[sender] = standing
        self.heard |= {sender}
        self._renew(standing)
        return self.standing.model_copy(update={"attempt": self.readies.next_attempt(sender, self.standing.round)})

    def _renew(self, standing: Standing) -> None:
        """A peer has used up this island's ready in a plan that never came here: be ready for a later attempt."""
        own = self.own
        if own is None or self.phase != "gathering" or self.plan is not None:
            return
        if standing.round == own.round and standing.attempt > own.attempt:
            self.own = own.model_copy(update={"attempt": standing.attempt})
            self._send(self.present, self.own)

    def _hear_plan(self, sender: str, plan: Plan) -> None:
        self._check_sender(sender, plan.planner)
        if self.plan is not None and plan.id == self.plan.id:
            return
        cause = self._objection(plan)
        if cause is None:
            self._accept(plan)
        elif plan.id not in self.ballot.outcomes:
            self._refuse(plan, cause)

    def _hear_vote(self, sender: str, vote: Vote) -> Heard:
        self._check_sender(sender, vote.island)
        is_near = self._is_near(vote.round)
        if is_near:
            self.ballot.check_room(vote.plan)
            self.ballot.keep(vote)
        elif vote.round > self.standing.round:  # An earlier one is long settled: its sender was frozen or cut off.
            raise MessageError(f"a vote on round {vote.round}, {self.me!r} is in round {self.standing.round}")
        return Heard(plan=vote.plan, outcome=self.ballot.outcome_of(vote.plan, is_near=is_near))

    def _hear_question(self, question: Question) -> Answer:
        outcome = self.ballot.outcome_of(question.plan, is_near=self._is_near(question.round))
        if outcome == "open":
            self.ballot.pledge(question.plan, question.round)
        return Answer(plan=question.plan, outcome=outcome)

    # -- gathering ----------------------------------------------------------------------------------------------
    def _absent(self, ready: Mapping[str, Ready]) -> frozenset[str]:
        """Islands worth waiting for: they live, and are not ready."""
        alive = self.present - self.lost - frozenset(ready)
        return frozenset(name for name in alive if name not in self.heard or self.standings[name].is_coming)

    def _short(self, agreeing: Mapping[str, Ready], *, is_late: bool) -> Short | None:
        # Once the first round has been planned they have come; a lost one is not waited for.
        is_start = self.standing.round == 0 and self.next_attempt == 0
        return find_short(self.rules, len(agreeing), is_start=is_start, is_late=is_late or not self._absent(agreeing))

    def _offer(self, readies: Mapping[str, Ready]) -> Plan:
        participants = [readies[name] for name in sorted(readies)]
        attempt = max(p.attempt for p in participants)
        plan = Plan(round=self.standing.round, attempt=attempt, planner=self.me, participants=participants)
        self._accept(plan)
        self._send(self.others, plan)
        return plan

    def _objection(self, plan: Plan) -> str | None:
        """Why this island does not take part, if so."""
        if plan.id in self.ballot.pledged or plan.id in self.ballot.outcomes:
            return "it has been given up here"
        if self.phase != "gathering" or self.own is None or self.plan is not None:
            return f"{self.me!r} is {self.phase} in round {self.standing.round}"
        return objection(plan, self.own, self.rules, self.next_attempt)

    def _accept(self, plan: Plan) -> None:
        self.plan, self.phase, self.is_asking = plan, "reducing", False
        self.readies.use(plan)

    def _refuse(self, plan: Plan, cause: str) -> None:
        """A no to all participants: a plan without us must not wait for us."""
        self.ballot.outcomes[plan.id] = (plan.round, "abort")
        if plan.round == self.standing.round:
            self.readies.use(plan)
        vote = no(plan, self.me, cause)
        self.ballot.keep(vote)
        self._send(frozenset(plan.names) & (self.present | {plan.planner}), vote)

    # -- voting -------------------------------------------------------------------------------------------------
    def _ask(self) -> Outcome:
        """Votes are missing, or somebody missed them: whoever has committed settles it; if nobody has, nobody will."""
        assert self.plan is not None
        if not self.is_asking:
            self.is_asking = True
            self._send(self._unanswered(), Question(plan=self.plan.id, round=self.plan.round))
        if self.ballot.is_committed_elsewhere(self.plan):
            return self._settle("commit")
        return "open" if self._unanswered() else self._settle("abort")

    def _unanswered(self) -> frozenset[str]:
        assert self.plan is not None
        return self.ballot.unanswered(self.plan) & self.others - self.lost

    def _settle(self, outcome: Outcome) -> Outcome:
        assert self.plan is not None
        self.ballot.outcomes[self.plan.id] = (self.plan.round, outcome)
        self.phase, self.own, self.is_asking = "training", None, False
        return outcome

    def _send(self, islands: Iterable[str], message: Message) -> None:
        self.outbox += [(name, message) for name in sorted(islands) if name != self.me]

    def _check_sender(self, sender: str, claimed: str) -> None:
        if sender != claimed:
            raise MessageError(f"{sender!r} speaks for {claimed!r}")

    def _is_near(self, round_number: int) -> bool:
        """A peer may run ahead by a round, never by more: anything else would fill memory."""
        return abs(round_number - self.standing.round) <= 1
