"""Every order of events that a few islands running outer.protocol can meet with, up to a bound on what goes wrong."""

import gc
import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

from outer.ballot import Ballot
from outer.errors import MessageError
from outer.protocol import Protocol
from outer.readies import Readies
from outer.rounds import Message, Plan, Ready, Standing, no, yes
from outer.verdicts import Behind, Rules, Short

START = "00" * 8
TOKENS = 10


@dataclass(frozen=True)
class Budget:
    """How often each thing may go wrong in one history."""

    crashes: int = 0
    freezes: int = 0
    """For ever, with all that it had yet to say; its answers have left with what it heard."""
    failed_reduces: int = 0
    dropped: int = 0
    duplicated: int = 0
    impatient: int = 0
    false_alarms: int = 0


@dataclass(frozen=True)
class Commit:
    """An island has applied a plan to the state `base`."""

    island: str
    plan: str
    round: int
    base: str
    participants: tuple[str, ...]


@dataclass
class World:
    """All islands and the messages under way. Copied for each step."""

    nodes: dict[str, Protocol]
    flying: tuple[tuple[str, str, Message, bool], ...]
    """Sender, receiver, message, and whether it is a reply (which is not replied to)."""
    dead: frozenset[str]
    """With those that are frozen."""
    frozen: frozenset[str]
    budget: Budget
    commits: tuple[Commit, ...]
    rounds: int

    @property
    def live(self) -> list[str]:
        return [name for name in self.nodes if name not in self.dead]

    @property
    def is_over(self) -> bool:
        """Every island that lives has the last round."""
        return all(self.nodes[name].standing.round >= self.rounds for name in self.live)


Event = tuple[str, ...]


def new_world(names: str, rounds: int, budget: Budget, **rules: object) -> World:
    start = Standing(round=0, tokens=0, digest=START)
    made = Rules(num_parts=1, **rules)  # pyright: ignore[reportArgumentType]
    nodes = {name: Protocol(name, made, start) for name in names}
    for node in nodes.values():
        node.meet(names)
    return World(nodes, (), frozenset(), frozenset(), budget, (), rounds)


def events(world: World) -> list[Event]:
    """All that may happen next. What a driver does by itself (`think`) has happened already."""
    found: list[Event] = [("deliver", str(i)) for i in range(len(world.flying))]
    for name in world.live:
        node = world.nodes[name]
        if node.phase == "training" and node.standing.round < world.rounds:
            found.append(("prepare", name))
        if may_give(node):
            found.append(("give", name))
        if node.phase == "reducing":
            found.append(("reduced", name))
            if world.budget.failed_reduces or node.others & world.dead:
                found.append(("failed", name))
        if may_be_late(world, name):
            found.append(("late", name))
        found += [("lose", name, other) for other in sorted(node.present - node.lost) if may_lose(world, name, other)]
    for kind, budget in (("crash", world.budget.crashes), ("freeze", world.budget.freezes)):
        if budget and len(world.live) > 1:
            found += [(kind, name) for name in world.live]
    for kind in ("dropped", "duplicated"):
        if getattr(world.budget, kind):
            found += [(kind, str(i)) for i in range(len(world.flying))]
    return found


def may_lose(world: World, name: str, other: str) -> bool:
    if other in world.frozen and any(name in mail[:2] for mail in world.flying):
        return False  # It is missed by a call that it does not answer: that takes far longer than a message.
    return other in world.dead or (world.budget.false_alarms > 0 and other in world.live)


def may_give(node: Protocol) -> bool:
    """Whether it listens, and its inner steps may be done any time now."""
    return node.phase == "gathering" and node.own is not None and node.own.listens


def may_be_late(world: World, name: str) -> bool:
    """Patience is far longer than a message takes, but votes may be missing for other reasons."""
    phase, is_quiet = world.nodes[name].phase, not any(name in mail[:2] for mail in world.flying)
    return world.budget.impatient > 0 and (phase == "voting" or (phase == "gathering" and is_quiet))


def step(world: World, event: Event) -> World:
    """The world after an event; a stuck one's repetitions and time-outs are events like others."""
    world = copy(world)
    kind, *who = event
    if kind in ("deliver", "dropped", "duplicated"):
        return _mail(world, kind, int(who[0]))
    name = who[0]
    if kind in ("crash", "freeze"):
        world.dead |= {name}
        world.flying = tuple(m for m in world.flying if m[1] != name)
        if kind == "crash":
            return _spend(world, "crashes")
        world.frozen |= {name}
        world.flying = tuple(m for m in world.flying if m[0] != name or m[3])
        return _spend(world, "freezes")
    node = _own_copy(world, name)
    late = kind == "late"
    if kind == "prepare":
        node.prepare(ready_of(node, listens=node.rules.has_listeners))
    elif kind == "give":
        node.give(ready_of(node))
    elif kind in ("reduced", "failed"):
        assert node.plan is not None
        plan = node.plan
        node.vote(yes(plan, name, digest_of(plan.id)) if kind == "reduced" else no(plan, name, "broken"))
        if kind == "failed" and not node.others & world.dead:
            _spend(world, "failed_reduces")
    elif kind == "lose":
        node.lose(who[1])
        if who[1] not in world.dead:
            _spend(world, "false_alarms")
    elif kind == "repeat":
        node.repeat()
    if late:
        _spend(world, "impatient")
    _think(world, node, is_late=late)
    return world


def ready_of(node: Protocol, *, listens: bool = False) -> Ready:
    s, tokens = node.standing, 0 if listens else TOKENS
    return Ready(
        island=node.me,
        incarnation="0" * 8,
        round=s.round,
        attempt=node.next_attempt,
        tokens=tokens,
        weight=tokens,
        listens=listens,
        base_tokens=s.tokens,
        digest=s.digest,
        carriers=[(0, 1)],
        transport_addresses=["t"],
        control_addresses=["c"],
    )


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _think(world: World, node: Protocol, *, is_late: bool = False) -> None:
    """What a driver does after every change: consider or conclude, apply, take a state, send."""
    if node.plan and node.phase == "reducing" and node.ballot.tally(node.plan) == "abort":
        node.vote(no(node.plan, node.me, "another island voted no"))
    if node.phase == "gathering":
        verdict = node.consider(is_late=is_late)
        if isinstance(verdict, Behind):
            _take_state(world, node, verdict)
        assert verdict is None or isinstance(verdict, Plan | Behind | Short)
    elif node.phase == "voting":
        outcome = node.conclude(is_late=is_late)
        if outcome == "commit":
            _apply(world, node)
    elif node.phase == "training":
        behind = node.behind(is_settled=node.standing.round >= world.rounds)
        if behind is not None:
            _take_state(world, node, behind)
    world.flying += tuple((node.me, to, m, False) for to, m in node.outbox if to not in world.dead)
    node.outbox = []


def _apply(world: World, node: Protocol) -> None:
    plan, base = node.plan, node.standing
    assert plan is not None
    world.commits += (Commit(node.me, plan.id, plan.round, base.digest, tuple(plan.names)),)
    tokens = base.tokens + sum(p.tokens for p in plan.participants)
    node.stand(Standing(round=plan.round + 1, tokens=tokens, digest=digest_of(base.digest + plan.id)))


def _take_state(world: World, node: Protocol, behind: Behind) -> None:
    donor = next((d for d in behind.donors if d in world.live), None)
    if donor is None:
        for name in behind.donors:
            node.lose(name)
        _think(world, node)
    else:
        node.stand(world.nodes[donor].standing)


def _mail(world: World, kind: str, index: int) -> World:
    sender, to, message, is_reply = world.flying[index]
    if kind != "duplicated":
        world.flying = world.flying[:index] + world.flying[index + 1 :]
    if kind != "deliver":
        _spend(world, kind)
    if kind == "dropped":
        return world
    node = _own_copy(world, to)
    try:
        reply = node.hear(sender, message)
    except MessageError:
        reply = None
    if reply is not None and not is_reply and sender not in world.dead:
        world.flying += ((to, sender, reply, True),)
    _think(world, node)
    return world


def _own_copy(world: World, name: str) -> Protocol:
    node = copy(world.nodes[name])
    node.ballot, node.readies = copy(node.ballot), copy(node.readies)
    for tables in (node, node.ballot, node.readies):
        vars(tables).update((key, copy(value)) for key, value in vars(tables).items() if isinstance(value, dict | list))
    world.nodes = world.nodes | {name: node}
    return node


def _spend(world: World, kind: str) -> World:
    world.budget = replace(world.budget, **{kind: getattr(world.budget, kind) - 1})
    return world


_numbers: dict[int, tuple[object, int]] = {}
"""By id: the value, kept so that its id stays its own, and the hash of what it says."""


def _number(value: object) -> object:
    """Equal for messages or nodes that say the same, made once for each; anything else as it is."""
    if not isinstance(value, Message | Protocol):
        return value
    found = _numbers.get(id(value))
    if found is None:
        said = (type(value).__name__, value.model_dump_json()) if isinstance(value, Message) else _describe(value)
        found = _numbers[id(value)] = (value, hash(said))
    return found[1]


def _describe(node: Protocol | Ballot | Readies) -> tuple[object, ...]:
    """All of its tables, without their order."""
    return tuple(
        frozenset((key, _number(v)) for key, v in value.items())
        if isinstance(value, dict)
        else _describe(value)
        if isinstance(value, Ballot | Readies)
        else _number(tuple(value) if isinstance(value, list) else value)
        for value in vars(node).values()
    )


def signature(world: World) -> int:
    """Equal for worlds that cannot be told apart."""
    nodes = tuple("dead" if name in world.dead else _number(node) for name, node in world.nodes.items())
    mail = frozenset(Counter((a, b, _number(m), r) for a, b, m, r in world.flying).items())
    return hash((nodes, mail, world.budget, world.dead, world.frozen))


def explore(world: World, max_states: int) -> Iterator[World]:
    """Every world that can be reached, each once, depth first; at most `max_states`."""
    _numbers.clear()
    seen: set[int] = set()
    stack = [world]
    gc.disable()  # Nothing here is cyclic, and it would go through all worlds again and again.
    try:
        while stack and len(seen) < max_states:
            here = stack.pop()
            key = signature(here)
            if key in seen:
                continue
            seen.add(key)
            yield here
            stack += [step(here, event) for event in events(here)]
    finally:
        gc.enable()


def walk(world: World, seed: int, mishap: float = 0.1) -> World:
    """One random history to its end; each step is a mishap with this probability while the budget lasts."""
    chance = random.Random(seed)
    for _ in range(600):
        found = events(world)
        plain = [e for e in found if not is_mishap(world, e)]
        mishaps = [e for e in found if is_mishap(world, e)]
        choices = mishaps if mishaps and (not plain or chance.random() < mishap) else plain
        if not choices:
            break
        world = step(world, chance.choice(choices))
    return settle(world)


def is_mishap(world: World, event: Event) -> bool:
    """Whether an event uses up some of the budget."""
    kind, *who = event
    if kind == "failed":
        return not world.nodes[who[0]].others & world.dead
    return kind in ("crash", "freeze", "dropped", "duplicated", "late") or (kind == "lose" and who[1] not in world.dead)


def settle(world: World) -> World:
    """Nothing goes wrong any more: everything is delivered, the dead are noticed, what was lost is said again."""
    world = copy(world)
    world.budget = Budget()
    for _ in range(60):
        while found := events(world):
            world = step(world, found[-1])
        if world.is_over and not world.flying and agree(world):
            return world
        world = _pass_time(world)
    return world


def _pass_time(world: World) -> World:
    """A second: everyone says again what may have been lost, where it stands, and waits no longer."""
    for name in world.live:
        world = step(world, ("repeat", name))
        node = world.nodes[name]
        for other in world.live:
            if other != name:
                world.flying += ((name, other, node.standing, False),)
    while world.flying:
        world = step(world, ("deliver", "0"))
    for name in world.live:
        if world.nodes[name].phase in ("gathering", "voting"):
            world = copy(world)
            node = _own_copy(world, name)
            _think(world, node, is_late=True)
    return world


def agree(world: World) -> bool:
    """Every live island holds the same state."""
    return len({(s.rank, s.digest) for s in (world.nodes[n].standing for n in world.live)}) <= 1


def forked(world: World, *, with_dead: bool = False) -> list[Commit]:
    """Commits of islands that live, or of all, that differ from another's on the same state."""
    by_base: dict[str, Commit] = {}
    wrong = []
    for c in world.commits:
        if c.island in world.dead and not with_dead:
            continue
        if by_base.setdefault(c.base, c).plan != c.plan:
            wrong.append(c)
    return wrong
