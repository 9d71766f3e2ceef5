"""Runs of a few islands under the round protocol, second by second, of which some lie, keep silent,
freeze or die.

The liars run the protocol, too, and each of their messages is falsified, sent to some only, or kept
back, as their habits say. The honest ones are connected: what they send arrives within a second, in
any order.
"""

import random
from dataclasses import dataclass, field

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import (
    Outcome,
    Plan,
    Status,
    Vote,
)
from outer.agreement.planner import GiveUp
from outer.agreement.rules import Behind, Rules
from outer.agreement.state_machine import RoundProtocol
from outer.errors import MessageError
from outer.network.messages import Message
from tests.outer.habits import Habit, made_up_states
from tests.outer.signers import claims_of
from tests.outer.world import START, digest_after, has_no, ready_of

SLOW, LATE, OVER, PLANLESS = 2, 4, 6, 3
"""Seconds until the planner is slow to pass on votes, until votes are late, until replies to a
query are, and until a planner is passed over.
"""
LOST = 2
"""Seconds until an island that does not answer is found to be lost."""
FIRST_DOUBT = 4
HELD_UP = 30
"""Seconds in one round after which an island counts as held up."""


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
        return min(
            self.nodes[name].knowledge.status.round for name in self.honest if name not in self.dead
        )

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
            node.outbox += [(other, node.knowledge.status) for other in sorted(self._pinged(name))]
            self.flush(name)
        for _ in range(400):
            if not self.step():
                break
        for name in self.awake:
            self.think(name)

    def _pinged(self, name: str) -> frozenset[str]:
        """The islands to which an island sends its status in this second."""
        coordination, others = self.nodes[name].coordination, frozenset(self.nodes) - {name}
        if coordination.coordinator is None or coordination.is_mine:
            return others
        return frozenset([coordination.coordinator, sorted(others)[self.second % len(others)]])

    def step(self) -> bool:
        """One island does something, or one message arrives. Returns False if there is nothing to
        do.
        """
        arriving = [i for i, mail in enumerate(self.mail) if mail[1] not in self.asleep]
        ready = [
            n
            for n in self.awake
            if self.nodes[n].state in ("training", "reducing") and n not in self.gave_up
        ]
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
        attempt, is_direct = (
            None if node.own is None else node.own.attempt,
            node.coordination.is_direct,
        )
        key = node.state, attempt, node.knowledge.status.round, is_direct
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
            outcome = node.conclude(
                is_late=waited >= LATE, is_over=waited >= OVER, is_slow=waited >= SLOW
            )
            if outcome != "open" and name not in self.liars:
                self.outcomes.setdefault(plan.id, set()).add(outcome)
            if outcome == "commit":
                tokens = node.knowledge.status.tokens + sum(p.tokens for p in plan.participants)
                node.update_status(
                    Status(round=plan.round + 1, tokens=tokens, digest=digest_after(plan))
                )
        elif node.state == "training" and (behind := node.knowledge.behind(is_settled=False)):
            self.follow(name, behind)
        self.flush(name)

    def follow(self, name: str, behind: Behind) -> None:
        """Take the state of a donor, or find out that none can give it."""
        node = self.nodes[name]
        claimed = {d: node.knowledge.statuses[d] for d in behind.donors if d in self.awake}
        held = {d: self.nodes[d].knowledge.status for d in claimed if d not in self.liars}
        # A liar may tell the truth: what it claims is the state that it has committed with others.
        held |= {d: s for d, s in claimed.items() if s.agrees_with(self.nodes[d].knowledge.status)}
        made_up = {
            d: s
            for d, s in claimed.items()
            if d not in held and made_up_states in self.liars.get(d, [])
        }
        # All of them claim the same digest, so what a liar gives in place of an honest one's state
        # is found out.
        if donors := held or made_up:
            giver = min(donors)
            if giver in made_up and name not in self.liars:
                self.fooled.append(name)
            if giver in held:
                node.knowledge.claims.restore(
                    self.nodes[giver].knowledge.claims.prove(donors[giver].claim)
                )
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
            for other in (gone & self._pinged(name)) - self.nodes[name].knowledge.lost - {name}:
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
