"""A few islands under the round protocol and the messages in flight, one event after the other."""

import hashlib
from copy import copy
from dataclasses import dataclass, field, replace

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Plan, Ready, Status, Vote
from outer.agreement.planner import TooFew
from outer.agreement.rules import Behind, Rules
from outer.agreement.state_machine import RoundProtocol
from outer.errors import MessageError
from outer.network.messages import Message
from tests.outer.signers import claims_of

START = "00" * 8
TOKENS = 10


@dataclass(frozen=True)
class Budget:
    """Number of times that each mishap may happen in one history."""

    crashes: int = 0
    freezes: int = 0
    """Freezes that never end: messages not sent yet are lost, replies to received ones are sent."""
    failed_reduces: int = 0
    dropped: int = 0
    duplicated: int = 0
    impatient: int = 0
    false_alarms: int = 0


@dataclass(frozen=True)
class Commit:
    """Record that an island has applied a plan to the state `base`."""

    island: str
    plan: str
    round: int
    base: str
    participants: tuple[str, ...]


@dataclass
class World:
    """All islands and the messages in flight. Every step copies it."""

    nodes: dict[str, RoundProtocol]
    flying: tuple[tuple[str, str, Message, bool], ...]
    """Sender, receiver, message, and whether it is a reply (which is not replied to)."""
    dead: frozenset[str]
    """Islands that have crashed or are frozen."""
    frozen: frozenset[str]
    budget: Budget
    commits: tuple[Commit, ...]
    rounds: int
    earlier: dict[str, str] = field(default_factory=dict)
    """Digests of earlier states to which islands would go back, by island."""

    @property
    def live(self) -> list[str]:
        return [name for name in self.nodes if name not in self.dead]

    @property
    def is_over(self) -> bool:
        """Whether every live island has the last round."""
        return all(self.status_of(name).round >= self.rounds for name in self.live)

    def status_of(self, name: str) -> Status:
        return self.nodes[name].knowledge.status


Event = tuple[str, ...]
ENDS = {"crash": "crashes", "freeze": "freezes"}
"""Events that end an island, with the field of the budget that each uses up."""


def new_world(names: str, rounds: int, budget: Budget, **rules: object) -> World:
    start = Status(round=0, tokens=0, digest=START)
    made = Rules(num_parts=1, **rules)  # pyright: ignore[reportArgumentType]
    nodes = {name: RoundProtocol(Knowledge(name, made, start, claims_of(name))) for name in names}
    for node in nodes.values():
        node.knowledge.add(names)
    return World(nodes, (), frozenset(), frozenset(), budget, (), rounds)


def events(world: World) -> list[Event]:
    """All events that may happen next. The driver's own reactions (`think`) have happened
    already.
    """
    found: list[Event] = [("deliver", str(i)) for i in range(len(world.flying))]
    for name in world.live:
        node = world.nodes[name]
        if (
            node.state == "training"
            and node.knowledge.status.round < world.rounds
            and not lacks_state(world, name)
        ):
            found.append(("prepare", name))
        if may_give(node):
            found.append(("give", name))
        if node.state == "reducing":
            found.append(("reduced", name))
            if world.budget.failed_reduces or node.others & world.dead:
                found.append(("failed", name))
        if may_be_late(world, name):
            found.append(("late", name))
        reachable = sorted(node.knowledge.present - node.knowledge.lost)
        found += [("lose", name, other) for other in reachable if may_lose(world, name, other)]
    for kind, budget in ENDS.items():
        if getattr(world.budget, budget) and len(world.live) > 1:
            found += [(kind, name) for name in world.live]
    for kind in ("dropped", "duplicated"):
        if getattr(world.budget, kind):
            found += [(kind, str(i)) for i in range(len(world.flying))]
    return found


def may_lose(world: World, name: str, other: str) -> bool:
    if other in world.frozen and any(name in mail[:2] for mail in world.flying):
        # A frozen island is noticed by an unanswered call, which takes far longer than a message.
        return False
    return other in world.dead or (world.budget.false_alarms > 0 and other in world.live)


def lacks_state(world: World, name: str) -> bool:
    """Whether the island waits for an earlier state, to which islands that have not committed yet
    go back with it.
    """
    return (
        name not in world.earlier
        and world.nodes[name].knowledge.behind(is_settled=False) is not None
    )


def may_give(node: RoundProtocol) -> bool:
    """Whether the island observes, so that its inner steps may end at any time."""
    return node.state == "gathering" and node.own is not None and node.own.listens


def may_be_late(world: World, name: str) -> bool:
    """Whether a time-out may fire: far later than any message arrives, unless votes are missing for
    another reason.
    """
    state, is_quiet = world.nodes[name].state, not any(name in mail[:2] for mail in world.flying)
    return world.budget.impatient > 0 and (state == "voting" or (state == "gathering" and is_quiet))


def step(world: World, event: Event) -> World:
    """The world after an event. Repetitions and time-outs are events, too."""
    world = copy(world)
    kind, *who = event
    if kind in ("deliver", "dropped", "duplicated"):
        return _mail(world, kind, int(who[0]))
    name = who[0]
    if kind in ENDS:
        return _end(world, kind, name)
    node = copy_node(world, name)
    late = kind == "late"
    if kind == "prepare":
        listens = node.knowledge.rules.has_observers
        node.prepare(ready_of(node, listens=listens, earlier=world.earlier.get(name)))
    elif kind == "give":
        node.contribute(ready_of(node))
    elif kind in ("reduced", "failed"):
        assert node.plan is not None
        plan = node.plan
        node.vote(
            Vote.yes(plan, name, digest_after(plan))
            if kind == "reduced"
            else Vote.no(plan, name, "broken")
        )
        if kind == "failed" and not node.others & world.dead:
            _spend(world, "failed_reduces")
    elif kind == "lose":
        node.mark_lost(who[1])
        if who[1] not in world.dead:
            _spend(world, "false_alarms")
    elif kind == "repeat":
        node.resend()
    if late:
        _spend(world, "impatient")
    think(world, node, is_late=late)
    return world


def _end(world: World, kind: str, name: str) -> World:
    world.dead |= {name}
    world.flying = tuple(m for m in world.flying if m[1] != name)
    if kind == "freeze":
        world.frozen |= {name}
        world.flying = tuple(m for m in world.flying if m[0] != name or m[3])
    return _spend(world, ENDS[kind])


def ready_of(node: RoundProtocol, *, listens: bool = False, earlier: str | None = None) -> Ready:
    s, tokens = node.knowledge.status, 0 if listens else TOKENS
    return Ready(
        island=node.knowledge.me,
        key=node.knowledge.signer.public,
        incarnation="0" * 8,
        round=s.round,
        attempt=node.next_attempt,
        tokens=tokens,
        weight=tokens,
        listens=listens,
        base_tokens=s.tokens,
        digest=s.digest,
        earlier=earlier,
        carriers=[(0, 1)],
        transport_addresses=["t"],
        control_addresses=["c"],
    )


def digest_after(plan: Plan) -> str:
    """Digest of the state that a commit of the plan leads to."""
    return digest_of(plan.participants[0].digest + plan.id)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def think(world: World, node: RoundProtocol, *, is_late: bool = False) -> None:
    """React like a driver after every change: plan or conclude, commit, take a state, send."""
    if node.plan and node.state == "reducing" and has_no(node, node.plan):
        node.vote(Vote.no(node.plan, node.knowledge.me, "another island voted no"))
    if node.state == "gathering":
        verdict = node.try_plan(is_late=is_late)
        if isinstance(verdict, Behind):
            _take_state(world, node, verdict)
        assert verdict is None or isinstance(verdict, Plan | Behind | TooFew)
    elif node.state == "voting":
        outcome = node.conclude(is_late=is_late)
        if outcome == "commit":
            _apply(world, node)
    elif node.state == "training":
        behind = node.knowledge.behind(is_settled=node.knowledge.status.round >= world.rounds)
        if behind is not None:
            _take_state(world, node, behind)
    world.flying += tuple(
        (node.knowledge.me, to, m, False) for to, m in node.outbox if to not in world.dead
    )
    node.outbox = []


def has_no(node: RoundProtocol, plan: Plan) -> bool:
    """Whether a participant has voted no, which ends the reduce."""
    votes = [node.vote_table.votes.get((plan.id, name)) for name in plan.names]
    return any(vote is not None and vote.digest is None for vote in votes)


def _apply(world: World, node: RoundProtocol) -> None:
    plan, base = node.plan, node.knowledge.status
    assert plan is not None
    if plan.earlier is not None and world.earlier.get(node.knowledge.me) != plan.earlier:
        return  # It has voted by the digest alone, and takes the state from the others.
    world.commits += (
        Commit(node.knowledge.me, plan.id, plan.round, base.digest, tuple(plan.names)),
    )
    tokens = base.tokens + sum(p.tokens for p in plan.participants)
    node.update_status(Status(round=plan.round + 1, tokens=tokens, digest=digest_after(plan)))


def _take_state(world: World, node: RoundProtocol, behind: Behind) -> None:
    donor = next((d for d in behind.donors if d in world.live), None)
    if donor is None:
        for name in behind.donors:
            node.mark_lost(name)
        think(world, node)
    elif world.status_of(donor).rank >= node.knowledge.status.rank:
        node.update_status(world.status_of(donor))


def _mail(world: World, kind: str, index: int) -> World:
    sender, to, message, is_reply = world.flying[index]
    if kind != "duplicated":
        world.flying = world.flying[:index] + world.flying[index + 1 :]
    if kind != "deliver":
        _spend(world, kind)
    if kind == "dropped":
        return world
    node = copy_node(world, to)
    try:
        reply = node.receive(sender, message)
    except MessageError:
        reply = None
    if reply is not None and not is_reply and sender not in world.dead:
        world.flying += ((to, sender, reply, True),)
    think(world, node)
    return world


def copy_node(world: World, name: str) -> RoundProtocol:
    node = copy(world.nodes[name])
    node.knowledge, node.readies = copy(node.knowledge), copy(node.readies)
    node.vote_table, node.suspicions = copy(node.vote_table), copy(node.suspicions)
    node.exchange, node.coordination, node.passing = (
        copy(node.exchange),
        copy(node.coordination),
        copy(node.passing),
    )
    node.knowledge.claims = claims = copy(node.knowledge.claims)
    claims.witnesses = copy(claims.witnesses)
    for tables in (
        node,
        node.knowledge,
        claims,
        claims.witnesses,
        node.readies,
        node.vote_table,
        node.suspicions,
        node.exchange,
        node.coordination,
        node.passing,
    ):
        vars(tables).update(
            (key, copy(value))
            for key, value in vars(tables).items()
            if isinstance(value, dict | list)
        )
    world.nodes = world.nodes | {name: node}
    return node


def _spend(world: World, kind: str) -> World:
    world.budget = replace(world.budget, **{kind: getattr(world.budget, kind) - 1})
    return world


def is_mishap(world: World, event: Event) -> bool:
    """Whether an event uses up a part of the budget."""
    kind, *who = event
    if kind == "failed":
        return not world.nodes[who[0]].others & world.dead
    return kind in (*ENDS, "dropped", "duplicated", "late") or (
        kind == "lose" and who[1] not in world.dead
    )
