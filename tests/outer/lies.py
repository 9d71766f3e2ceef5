"""Runs of a few islands under the round protocol, second by second, of which some lie, keep silent, freeze or die.

The liars run the protocol, too, and each of their messages is falsified, sent to some only, or kept back, as their
habits say. The honest ones are connected: what they send arrives within a second, in any order.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import (
    Goodbye,
    Outcome,
    OutcomeQuery,
    OutcomeReply,
    Plan,
    Ready,
    Status,
    Vote,
    VoteReceipt,
)
from outer.agreement.planner import GiveUp
from outer.agreement.proofs.certificate import Certificate, Proof, Statement, build_certificate
from outer.agreement.rules import Behind, Rules
from outer.agreement.state_machine import RoundProtocol
from outer.errors import MessageError
from outer.network.messages import Message
from tests.outer.signers import FakeSigner, claims_of, public_of
from tests.outer.world import START, digest_after, digest_of, has_no, ready_of

LATE, OVER, PLANLESS = 4, 6, 3
"""Seconds until votes are late, until replies to a query are, and until a planner is passed over."""
LOST = 2
"""Seconds until an island that does not answer is found to be lost."""
FIRST_DOUBT = 4
HELD_UP = 30
"""Seconds in one round after which an island counts as held up."""

Habit = Callable[["Run", str, str, Message], Message | None]
"""What a liar makes of a message: (run, liar, receiver, message) to what it sends, or None to send nothing."""


def wrong_digest(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    plan = run.nodes[liar].plan
    if not isinstance(message, Vote) or message.digest is None or plan is None or message.plan != plan.id:
        return message
    digest = digest_of(liar + to * run.chance.randint(0, 1))
    signature = run.nodes[liar].knowledge.signer.sign(plan.statement(digest).text)
    return message.model_copy(update={"digest": digest, "signature": signature})


def no_votes(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return None if isinstance(message, Vote) else message


def no_receipts(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return None if isinstance(message, VoteReceipt | OutcomeReply) else message


def no_plans(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return None if isinstance(message, Plan) else message


def votes_to_some(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return None if isinstance(message, Vote | Plan) and run.chance.random() < 0.5 else message


def plain_noes(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    if not isinstance(message, Vote):
        return message
    return Vote(plan=message.plan, round=message.round, island=liar, cause="disk full")


def false_accusations(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    if not isinstance(message, Vote):
        return message
    accused = run.chance.choice(run.honest)
    return Vote(plan=message.plan, round=message.round, island=liar, cause="nan", accused=accused)


def aborted(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    is_answer = isinstance(message, VoteReceipt | OutcomeReply)
    return message.model_copy(update={"outcome": "abort"}) if is_answer else message


def queries(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """Asks for the outcome of each plan at once, so that nobody commits it on votes alone."""
    if isinstance(message, Vote):
        run.send(liar, to, OutcomeQuery(plan=message.plan, round=message.round))
    return message


def claims_to_be_ahead(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    if not isinstance(message, Status) or run.chance.random() < 0.5:
        return message
    return Status(round=99, tokens=1 << run.chance.randint(40, 60), digest=digest_of(liar), is_coming=True)


def comes_and_goes(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    if run.chance.random() < 0.7:
        return message
    return Goodbye(island=liar, incarnation="0" * 8, round=0, steps=0)


def never_ready(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    return message if not isinstance(message, Ready) or run.chance.random() < 0.3 else None


def false_commits(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """Keeps its votes from some, and tells some of those who ask that it has committed."""
    if isinstance(message, Vote):
        return message if run.chance.random() < 0.5 else None
    if not isinstance(message, OutcomeReply) or run.chance.random() < 0.3:
        return message
    plan = run.nodes[liar].plan
    certificate = None if plan is None else forge(run, liar, plan.statement(digest_after(plan)))
    return OutcomeReply(plan=message.plan, outcome="commit", certificate=certificate)


def made_up_states(run: "Run", liar: str, to: str, message: Message) -> Message | None:
    """Claims to be ahead with a state that it has made up and gives to whoever asks, and forges proofs of it.

    It invents islands that sign, too, except for islands that know no other from a commit: those cannot tell.
    """
    if isinstance(message, Status):
        here = run.nodes[liar].knowledge.status
        digest = f"{run.chance.randint(0, 3):016x}"
        return Status(round=here.round + run.chance.randint(0, 2), tokens=here.tokens + 30, digest=digest)
    claim = run.nodes[to].knowledge.claims.asked.get(liar) if to in run.nodes else None
    if not isinstance(message, Proof) or claim is None:
        return message
    base = {"plan": "0" * 32, "base": digest_of(liar), "base_tokens": 0}
    can_tell = run.nodes[to].knowledge.claims.witnesses.num_others > 0
    invented = [liar, "z1", "z2"] if can_tell else [liar]
    islands = sorted(run.chance.choice([invented, list(run.nodes)]))
    statement = Statement(
        **base,
        round=max(0, claim.round - 1),
        tokens=claim.tokens,
        digest=claim.digest,
        islands=islands,
        keys=[public_of(name) for name in islands],
    )
    return Proof(certificate=forge(run, liar, statement))


def forge(run: "Run", liar: str, statement: Statement) -> Certificate:
    """The best that a liar can do: its own signature, those of islands that it has invented, and noise for others'."""
    signers = {name: FakeSigner(name) for name in statement.islands if name == liar or name not in run.nodes}
    noise = f"{run.chance.getrandbits(512):0128x}"
    signatures = {name: signers[name].sign(statement.text) if name in signers else noise for name in statement.islands}
    return build_certificate(statement, signatures)


HABITS: list[Habit] = [
    wrong_digest,
    no_votes,
    no_receipts,
    no_plans,
    votes_to_some,
    plain_noes,
    false_accusations,
    aborted,
    queries,
    claims_to_be_ahead,
    comes_and_goes,
    never_ready,
    false_commits,
]
WITH_A_QUORUM = [*HABITS, made_up_states]
"""With a quorum of one, an island alone may make a history, so it may make one up, too."""


@dataclass
class Run:
    """All islands, second by second."""

    nodes: dict[str, RoundProtocol]
    liars: dict[str, list[Habit]]
    chance: random.Random
    dead: set[str] = field(default_factory=set)
    asleep: dict[str, int] = field(default_factory=dict)
    """Seconds until each frozen island wakes."""
    mail: list[tuple[str, str, Message, bool]] = field(default_factory=list)
    since: dict[str, tuple[object, int]] = field(default_factory=dict)
    """(state and attempt, second in which it began) by island."""
    rounds: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(round, second in which the island was first ready for it) by island."""
    doubts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """(second in which the doubt ends, failures) by island and liar."""
    gave_up: dict[str, str] = field(default_factory=dict)
    fooled: list[str] = field(default_factory=list)
    """Honest islands that took a state which nobody has computed."""
    outcomes: dict[str, set[Outcome]] = field(default_factory=dict)
    """What became of each plan on the honest islands."""
    second: int = 0
    num_attempts: int = 0

    @property
    def honest(self) -> list[str]:
        return [name for name in self.nodes if name not in self.liars]

    @property
    def awake(self) -> list[str]:
        return [name for name in self.nodes if name not in self.dead and name not in self.asleep]

    @property
    def slowest(self) -> int:
        """The round of the honest island that lives and is the farthest behind."""
        return min(self.nodes[name].knowledge.status.round for name in self.honest if name not in self.dead)

    def pass_second(self) -> None:
        """Everybody repeats its messages, and what is under way arrives in any order."""
        self.second += 1
        self.asleep = {name: left - 1 for name, left in self.asleep.items() if left > 1}
        self._lose()
        for name in self.awake:
            node = self.nodes[name]
            for (me, liar), (until, _) in self.doubts.items():
                if me == name and until == self.second:
                    node.knowledge.believe(liar)
            node.resend()
            node.outbox += [(other, node.knowledge.status) for other in self.nodes if other != name]
            self.flush(name)
        for _ in range(400):
            if not self.step():
                break
        for name in self.awake:
            self.think(name)

    def step(self) -> bool:
        """One island does something, or one message arrives. Returns False if there is nothing to do."""
        arriving = [i for i, mail in enumerate(self.mail) if mail[1] not in self.asleep]
        ready = [n for n in self.awake if self.nodes[n].state in ("training", "reducing") and n not in self.gave_up]
        if not arriving and not ready:
            return False
        if ready and (not arriving or self.chance.random() < 0.2):
            self.act(self.chance.choice(ready))
        else:
            self.deliver(*self.mail.pop(self.chance.choice(arriving)))
        return bool(self.mail)

    def act(self, name: str) -> None:
        node = self.nodes[name]
        if node.state == "training":
            node.prepare(ready_of(node))
        elif node.plan is not None:
            plan, gone = node.plan, self.dead | self.asleep.keys()
            if has_no(node, plan) or node.others & gone:
                node.vote(Vote.no(plan, name, "broken"))
            else:
                node.vote(Vote.yes(plan, name, digest_after(plan)))
        self.flush(name)
        self.think(name)

    def deliver(self, sender: str, to: str, message: Message, is_reply: bool) -> None:
        if to in self.dead:
            return
        node = self.nodes[to]
        try:
            reply = node.receive(sender, message)
        except MessageError:
            reply = None
        if reply is not None and not is_reply:
            self.send(to, sender, reply, is_reply=True)
        self.think(to)

    def think(self, name: str) -> None:
        """What the driver does after a change."""
        node = self.nodes[name]
        key = node.state, None if node.own is None else node.own.attempt, node.knowledge.status.round
        if self.since.get(name, (None, 0))[0] != key:
            self.since[name] = key, self.second
        waited = self.second - self.since[name][1]
        if node.state == "gathering":
            if self.rounds.get(name, (-1, 0))[0] != node.knowledge.status.round:
                self.rounds[name] = node.knowledge.status.round, self.second
            node.knowledge.is_held_up = self.second - self.rounds[name][1] >= HELD_UP
            if waited >= PLANLESS and node.plan is None and node.pass_over(is_late=waited >= LATE):
                self.since[name] = key, self.second
            decision = node.try_plan(is_late=waited >= LATE)
            if isinstance(decision, GiveUp):
                self.gave_up[name] = decision.cause
            if isinstance(decision, Plan):
                self.num_attempts += 1
            if isinstance(decision, Behind):
                self.follow(name, decision)
        elif node.state == "voting":
            plan = node.plan
            assert plan is not None
            outcome = node.conclude(is_late=waited >= LATE, is_over=waited >= OVER)
            if outcome != "open" and name not in self.liars:
                self.outcomes.setdefault(plan.id, set()).add(outcome)
            if outcome == "commit":
                tokens = node.knowledge.status.tokens + sum(p.tokens for p in plan.participants)
                node.update_status(Status(round=plan.round + 1, tokens=tokens, digest=digest_after(plan)))
        elif node.state == "training" and (behind := node.knowledge.behind(is_settled=False)):
            self.follow(name, behind)
        self.flush(name)

    def follow(self, name: str, behind: Behind) -> None:
        """Take the state of a donor, or find out that none can give it."""
        node = self.nodes[name]
        claimed = {d: node.knowledge.statuses[d] for d in behind.donors if d in self.awake}
        held = {d: self.nodes[d].knowledge.status for d in claimed if d not in self.liars}
        made_up = {d: s for d, s in claimed.items() if made_up_states in self.liars.get(d, [])}
        # All of them claim the same digest, so what a liar gives in place of an honest one's state is found out.
        if donors := held or made_up:
            giver = min(donors)
            if giver in made_up and name not in self.liars:
                self.fooled.append(name)
            if giver in held:
                node.knowledge.claims.restore(self.nodes[giver].knowledge.claims.prove(donors[giver].claim))
            node.update_status(donors[giver])
            return
        for donor in behind.donors:
            failures = self.doubts.get((name, donor), (0, 0))[1] + 1
            self.doubts[name, donor] = self.second + FIRST_DOUBT * 2 ** (failures - 1), failures
            node.knowledge.disbelieve(donor, node.knowledge.statuses[donor])

    def flush(self, name: str) -> None:
        node = self.nodes[name]
        outbox, node.outbox = node.outbox, []
        for to, message in outbox:
            self.send(name, to, message)

    def send(self, sender: str, to: str, message: Message, *, is_reply: bool = False) -> None:
        changed: Message | None = message
        for habit in self.liars.get(sender, []):
            changed = None if changed is None else habit(self, sender, to, changed)
        if changed is not None and to in self.nodes:
            self.mail.append((sender, to, changed, is_reply))

    def _lose(self) -> None:
        """Islands that have not answered for some time are found to be lost."""
        gone = self.dead | {name for name, left in self.asleep.items() if left > LOST}
        for name in self.awake:
            for other in gone - self.nodes[name].knowledge.lost - {name}:
                self.nodes[name].mark_lost(other)


def new_run(names: str, liars: dict[str, list[Habit]], seed: int, **rules: object) -> Run:
    start = Status(round=0, tokens=0, digest=START)
    made = Rules(num_parts=1, max_round=1000, **rules)  # pyright: ignore[reportArgumentType]
    nodes = {name: RoundProtocol(Knowledge(name, made, start, claims_of(name))) for name in names}
    for node in nodes.values():
        node.knowledge.add(names)
    return Run(nodes, liars, random.Random(seed))


def seconds_until(run: Run, round_number: int, most: int) -> int:
    """Seconds until all honest islands that live have committed so many rounds, at most `most`."""
    started = run.second
    while run.slowest < round_number and run.second - started < most and not run.gave_up:
        run.pass_second()
    return run.second - started
