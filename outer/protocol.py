"""The round protocol of one island as a state machine: messages in, messages out. No sockets, no clocks, no tasks.

               prepare            accept or offer a plan       vote
    training ----------> gathering ------------------> reducing -----> voting
        ^                    ^                                           |
        |  commit            |______________ abort ______________________|
        |________________________________________________________________|

The driver (agreement.py) delivers what peers say, tells when patience has run out, and sends what is in `outbox`.

Why a committed round is the same everywhere. An island commits a plan when every participant has voted yes with one
digest, or when a participant says that it has committed it. An island that misses votes asks all participants it
reaches; who is asked and has not committed will not commit on votes alone any more, but asks in turn. So while
islands only crash, either all survivors commit a plan or none does. When a partition or a false alarm lets two
histories grow, the one with the higher rank (Standing.rank) survives and the others take its state.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from outer.errors import MessageError
from outer.rounds import Answer, Goodbye, Message, Outcome, Plan, Question, Ready, Standing, Vote, no

Phase = Literal["training", "gathering", "reducing", "voting"]
MAX_ISLANDS = 1024
MAX_FOREIGN_PLANS = 256
"""Plans not accepted here whose votes and questions are remembered."""


@dataclass(frozen=True)
class Rules:
    """When a plan may be fixed, and what a peer may claim."""

    quorum: int = 1
    start_islands: int = 1
    below_quorum: Literal["wait", "continue", "stop"] = "wait"
    num_parts: int = 1
    max_tokens: int = 1 << 52
    """Most tokens that an island can have trained on in a round."""
    max_round: int = 1 << 29


@dataclass(frozen=True)
class Behind:
    """Others hold the state that survives; any of `donors` can give it."""

    donors: tuple[str, ...]
    cause: str


@dataclass(frozen=True)
class Short:
    """Too few islands for a plan. `is_start`: the run has not begun yet."""

    present: int
    needed: int
    is_start: bool


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
    readies: dict[str, Ready] = field(default_factory=dict)
    used: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By island: round and attempt of its last ready that went into a plan seen here."""
    votes: dict[tuple[str, str], Vote] = field(default_factory=dict)
    """By plan and island."""
    answers: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    outcomes: dict[str, tuple[int, Outcome]] = field(default_factory=dict)
    """By plan: its round and what came of it here."""
    pledged: dict[str, int] = field(default_factory=dict)
    """Plans, by round, that others have asked about while they were open here."""
    accusations: dict[tuple[str, str], int] = field(default_factory=dict)
    """By accuser and accused: the round. Both fields of `Vote`."""
    is_asking: bool = False
    outbox: list[tuple[str, Message]] = field(default_factory=list)

    # -- what the island does -----------------------------------------------------------------------------------

    def stand(self, standing: Standing) -> None:
        """This island holds another state now, by a commit or from donors."""
        self.standing = standing
        self.phase, self.own, self.plan, self.is_asking = "training", None, None, False
        self._forget(standing.round)

    def prepare(self, own: Ready) -> None:
        """The inner steps are done. `own.attempt` is `next_attempt`."""
        assert own.standing.rank == self.standing.rank, "a ready for another state than this island's"
        self.phase, self.own, self.plan, self.is_asking = "gathering", own, None, False
        self.standing = own.standing
        self.heard = frozenset()
        self._send(self.present, own)

    @property
    def next_attempt(self) -> int:
        """One more than every attempt at this round that this island has taken part in."""
        used_round, used_attempt = self.used.get(self.me, (-1, -1))
        return used_attempt + 1 if used_round == self.standing.round else 0

    def consider(self, *, is_late: bool) -> Plan | Behind | Short | None:
        """What to do in the gathering: take part in a plan, take a state, or (None) wait.

        `is_late`: the grace has run out; islands that are not ready are not waited for.
        """
        assert self.own is not None, "an island considers plans when it is ready"
        if self.plan is not None:
            return self.plan
        ready = self._ready_now()
        absent = self._absent(ready)
        if behind := self.behind(is_settled=is_late or not absent):
            self.phase, self.own = "training", None  # From now on it refuses plans.
            return behind
        shut_out = self._shut_out()
        agreeing = {name: r for name, r in ready.items() if r.digest == self.own.digest and name not in shut_out}
        if self.me in shut_out:
            return None  # The others go on without this island; it takes their state then.
        if short := self._short(agreeing, is_late=is_late):
            return short
        planner = min(agreeing) if is_late else min(set(agreeing) | absent)
        if planner != self.me or (absent and not is_late):
            return None
        return self._offer(agreeing)

    def vote(self, vote: Vote) -> None:
        """Say what came of the reduce here."""
        assert self.plan is not None, "an island votes on the plan it takes part in"
        assert vote.plan == self.plan.id, "an island votes on the plan it takes part in"
        self.phase = "voting"
        self._keep_vote(vote)
        self._send(self.others, vote)

    def conclude(self, *, is_late: bool) -> Outcome:
        """What comes of the plan; open: not known yet. `is_late`: votes are not waited for any longer."""
        assert self.plan is not None, "an island concludes the plan it takes part in"
        outcome = self._tally()
        if outcome == "abort" or (outcome == "commit" and self.plan.id not in self.pledged):
            return self._settle(outcome)
        missing = self.others - {name for name in self.others if (self.plan.id, name) in self.votes}
        if outcome == "open" and self.plan.id not in self.pledged and not is_late and missing - self.lost:
            return "open"
        return self._ask()

    def repeat(self) -> None:
        """Say again what may have been lost on the way."""
        if self.phase == "gathering" and self.own is not None:
            self._send(self.present, self.own)
        if self.phase == "voting" and self.plan is not None:
            missing = {name for name in self.others if (self.plan.id, name) not in self.votes}
            self._send(missing, self.votes[self.plan.id, self.me])
            if self.is_asking:
                self._send(self._unanswered(), Question(plan=self.plan.id, round=self.plan.round))

    @property
    def others(self) -> frozenset[str]:
        """The other participants of the plan."""
        return frozenset(self.plan.names) - {self.me} if self.plan else frozenset()

    @property
    def has_heard_no(self) -> bool:
        """Whether a participant has voted the plan down."""
        return self.plan is not None and self._tally() == "abort"

    def behind(self, *, is_settled: bool) -> Behind | None:
        """Whether another history than this island's survives. `is_settled`: all who count have been heard."""
        live = self.live
        best = max((*live.values(), self.standing), key=lambda s: s.rank)
        ours = (*self.standing.rank, self.standing.digest)
        rivals = {name: s.digest for name, s in live.items() if s.rank == best.rank}
        if best.rank == self.standing.rank:
            if not is_settled:
                return None  # Those who have not spoken yet count in the majority, too.
            rivals[self.me] = self.standing.digest
        digest = majority(rivals.values())
        if (*best.rank, digest) == ours:
            return None
        donors = tuple(sorted(name for name, theirs in rivals.items() if theirs == digest))
        cause = f"{', '.join(donors)} in round {best.round} with {best.tokens} tokens and digest {digest[:12]}"
        return Behind(donors, f"{cause}; this island in round {ours[1]} with {ours[0]} tokens and {ours[2][:12]}")

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
        self.readies.pop(island, None)
        self.standings.pop(island, None)

    def lose(self, island: str) -> None:
        """It does not answer, or its connection is gone."""
        self.lost |= {island}
        if island in self.others:
            self.doubt()

    def doubt(self) -> None:
        """The others may have given this island up: from now on it does not commit the open plan without asking."""
        if self.plan is not None and self.phase in ("reducing", "voting"):
            self.pledged[self.plan.id] = self.plan.round

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
                self._hear_vote(sender, message)
            case Question():
                return self._hear_question(message)
            case Answer():
                if self.plan is not None and message.plan == self.plan.id:
                    self.answers[message.plan, sender] = message.outcome
        return None

    def _hear_ready(self, sender: str, ready: Ready) -> Standing:
        self._check_sender(sender, ready.island)
        ready.check(self.rules.num_parts)
        if ready.tokens > self.rules.max_tokens:
            raise MessageError(f"{sender!r} claims {ready.tokens} tokens, a round has at most {self.rules.max_tokens}")
        earlier = self.readies.get(sender)
        if earlier is not None and earlier.incarnation != ready.incarnation:
            self.used.pop(sender, None)
        self.readies[sender] = ready
        return self._hear_standing(sender, ready.standing)

    def _hear_standing(self, sender: str, standing: Standing) -> Standing:
        if standing.round > self.rules.max_round:
            raise MessageError(f"{sender!r} claims round {standing.round}, the run has {self.rules.max_round}")
        self.standings[sender] = standing
        self.heard |= {sender}
        self._renew(standing)
        used_round, used_attempt = self.used.get(sender, (-1, -1))
        attempt = used_attempt + 1 if used_round == self.standing.round else 0
        return self.standing.model_copy(update={"attempt": attempt})

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
        elif plan.id not in self.outcomes:
            self._refuse(plan, cause)

    def _hear_vote(self, sender: str, vote: Vote) -> None:
        self._check_sender(sender, vote.island)
        if vote.round < self.standing.round - 1:
            return  # Long settled: its sender was frozen or cut off.
        if not self._is_near(vote.round):
            raise MessageError(f"a vote on round {vote.round}, {self.me!r} is in round {self.standing.round}")
        self._check_room(vote.plan)
        self._keep_vote(vote)

    def _hear_question(self, question: Question) -> Answer:
        if question.plan in self.outcomes:
            return Answer(plan=question.plan, outcome=self.outcomes[question.plan][1])
        if not self._is_near(question.round):
            # Too long ago to remember, or of a history that this island has left: it will not commit that plan.
            return Answer(plan=question.plan, outcome="abort")
        # The asker may abort on our "open": from now on we do not commit on votes alone.
        self._check_room(question.plan)
        self.pledged[question.plan] = question.round
        return Answer(plan=question.plan, outcome="open")

    # -- gathering ----------------------------------------------------------------------------------------------

    def _keep_vote(self, vote: Vote) -> None:
        """The first that an island casts on a plan counts."""
        self.votes.setdefault((vote.plan, vote.island), vote)
        if vote.accused is not None and vote.digest is None:
            self.accusations[vote.island, vote.accused] = vote.round

    def _shut_out(self) -> frozenset[str]:
        """Accused in this round by another island; and whoever accuses two, or else one could shut out all."""
        now = [pair for pair, round_number in self.accusations.items() if round_number == self.standing.round]
        by_accuser = Counter(accuser for accuser, _ in now)
        liars = {accuser for accuser, count in by_accuser.items() if count > 1}
        return frozenset(liars | {accused for accuser, accused in now if accuser not in liars})

    def _ready_now(self) -> dict[str, Ready]:
        """Islands that could take part in the next attempt, this one included."""
        assert self.own is not None
        fresh = {
            name: ready
            for name, ready in self.readies.items()
            if ready.round == self.own.round
            and name in self.present - self.lost
            and (ready.round, ready.attempt) > self.used.get(name, (-1, -1))
        }
        return fresh | {self.me: self.own}

    def _absent(self, ready: Mapping[str, Ready]) -> frozenset[str]:
        """Islands worth waiting for: they live, and are not ready."""
        alive = self.present - self.lost - frozenset(ready)
        return frozenset(name for name in alive if name not in self.heard or self.standings[name].is_coming)

    def _short(self, agreeing: Mapping[str, Ready], *, is_late: bool) -> Short | None:
        # Once the first round has been planned they have come; a lost one is not waited for.
        is_start = self.standing.round == 0 and self.next_attempt == 0
        if is_start and len(agreeing) < self.rules.start_islands:
            return Short(len(agreeing), self.rules.start_islands, is_start=True)
        goes_on = self.rules.below_quorum == "continue" and (is_late or not self._absent(agreeing))
        if len(agreeing) >= self.rules.quorum or goes_on:
            return None
        return Short(len(agreeing), self.rules.quorum, is_start=False)

    def _offer(self, readies: Mapping[str, Ready]) -> Plan:
        participants = [readies[name] for name in sorted(readies)]
        attempt = max(p.attempt for p in participants)
        plan = Plan(round=self.standing.round, attempt=attempt, planner=self.me, participants=participants)
        self._accept(plan)
        self._send(self.others, plan)
        return plan

    def _objection(self, plan: Plan) -> str | None:
        """Why this island does not take part, if so."""
        if plan.id in self.pledged or plan.id in self.outcomes:
            return "it has been given up here"
        if self.phase != "gathering" or self.own is None or self.plan is not None:
            return f"{self.me!r} is {self.phase} in round {self.standing.round}"
        return objection(plan, self.own, self.rules.num_parts)

    def _accept(self, plan: Plan) -> None:
        self.plan, self.phase, self.is_asking = plan, "reducing", False
        self._use(plan)

    def _refuse(self, plan: Plan, cause: str) -> None:
        """A no to all participants: a plan without us must not wait for us."""
        self.outcomes[plan.id] = (plan.round, "abort")
        if plan.round == self.standing.round:
            self._use(plan)
        vote = no(plan, self.me, cause)
        self._keep_vote(vote)
        self._send(frozenset(plan.names) & (self.present | {plan.planner}), vote)

    def _use(self, plan: Plan) -> None:
        """The readies in a plan are used up: the next attempt needs new ones."""
        for p in plan.participants:
            self.used[p.island] = max(self.used.get(p.island, (-1, -1)), (plan.round, max(plan.attempt, p.attempt)))

    # -- voting -------------------------------------------------------------------------------------------------

    def _tally(self) -> Outcome:
        """What the votes say: one no, or two digests, abort; all yes commit; otherwise still open."""
        assert self.plan is not None
        cast = [v for name in self.plan.names if (v := self.votes.get((self.plan.id, name)))]
        if any(v.digest is None for v in cast) or len({v.digest for v in cast}) > 1:
            return "abort"
        return "commit" if len(cast) == len(self.plan.names) else "open"

    def _ask(self) -> Outcome:
        """Votes are missing, or somebody missed them: whoever has committed settles it; if nobody has, nobody will."""
        assert self.plan is not None
        if not self.is_asking:
            self.is_asking = True
            self._send(self._unanswered(), Question(plan=self.plan.id, round=self.plan.round))
        if any(self.answers.get((self.plan.id, name)) == "commit" for name in self.others):
            return self._settle("commit")
        return "open" if self._unanswered() else self._settle("abort")

    def _unanswered(self) -> frozenset[str]:
        assert self.plan is not None
        return frozenset(n for n in self.others - self.lost if (self.plan.id, n) not in self.answers)

    def _settle(self, outcome: Outcome) -> Outcome:
        assert self.plan is not None
        self.outcomes[self.plan.id] = (self.plan.round, outcome)
        self.phase, self.own, self.is_asking = "training", None, False
        return outcome

    # -- plumbing -----------------------------------------------------------------------------------------------

    def _send(self, islands: Iterable[str], message: Message) -> None:
        self.outbox += [(name, message) for name in sorted(islands) if name != self.me]

    def _check_sender(self, sender: str, claimed: str) -> None:
        if sender != claimed:
            raise MessageError(f"{sender!r} speaks for {claimed!r}")

    def _is_near(self, round_number: int) -> bool:
        """A peer may run ahead by a round, never by more: anything else would fill memory."""
        return abs(round_number - self.standing.round) <= 1

    def _check_room(self, plan: str) -> None:
        known = {key[0] for key in self.votes} | set(self.pledged)
        if plan not in known and len(known) >= MAX_FOREIGN_PLANS:
            raise MessageError(f"{self.me!r} hears of too many plans in round {self.standing.round}")

    def _forget(self, round_number: int) -> None:
        """Drop what was said of rounds before the last one."""
        self.votes = {k: v for k, v in self.votes.items() if v.round >= round_number - 1}
        self.pledged = {k: r for k, r in self.pledged.items() if r >= round_number - 1}
        self.outcomes = {k: v for k, v in self.outcomes.items() if v[0] >= round_number - 1}
        self.accusations = {k: r for k, r in self.accusations.items() if r >= round_number}
        kept = set(self.outcomes) | set(self.pledged) | {k[0] for k in self.votes}
        self.answers = {k: v for k, v in self.answers.items() if k[0] in kept}


def majority(digests: Iterable[str]) -> str:
    """The digest that most hold; among equals the lowest."""
    counts = Counter(digests)
    return min(counts, key=lambda digest: (-counts[digest], digest))


def objection(plan: Plan, own: Ready, num_parts: int) -> str | None:
    """Why `own`'s island cannot take part in the plan, or None: it is there as it is now, all hold its state."""
    if plan.round != own.round:
        return f"the plan is for round {plan.round}, {own.island!r} is in round {own.round}"
    if plan.names != sorted(set(plan.names)):
        return "participants are repeated or out of order"
    if own not in plan.participants:
        return f"{own.island!r} is not in the plan as it is now"
    for participant in plan.participants:
        if participant.digest != own.digest:
            return f"the state of {participant.island!r} differs from that of {own.island!r}"
        try:
            participant.check(num_parts)
        except MessageError as error:
            return str(error)
    return None
