"""Searches every order of events among a few islands that run the round protocol, up to a bound on
mishaps.
"""

import gc
import random
from collections import Counter
from collections.abc import Iterator
from copy import copy

from outer.agreement.coordination import Coordination, Passing
from outer.agreement.knowledge import Knowledge, ReadyTable
from outer.agreement.proofs.claims import Claims
from outer.agreement.proofs.witnesses import Witnesses
from outer.agreement.state_machine import RoundProtocol
from outer.agreement.suspicions import Suspicions
from outer.agreement.vote_exchange import VoteExchange
from outer.agreement.votes import VoteTable
from outer.network.messages import Message
from tests.outer.world import Budget, Commit, World, copy_node, events, is_mishap, step, think

Tables = (
    Knowledge
    | Claims
    | Witnesses
    | ReadyTable
    | VoteTable
    | VoteExchange
    | Coordination
    | Suspicions
    | Passing
)
_numbers: dict[int, tuple[object, int]] = {}
"""(value, hash of its contents) by id. The value is kept so that its id is not reused."""


def _number(value: object) -> object:
    """A hash that is equal for messages or nodes with equal contents, computed once each; other
    values as they are.
    """
    if not isinstance(value, Message | RoundProtocol):
        return value
    found = _numbers.get(id(value))
    if found is None:
        said = (
            (type(value).__name__, value.model_dump_json())
            if isinstance(value, Message)
            else _describe(value)
        )
        found = _numbers[id(value)] = (value, hash(said))
    return found[1]


def _describe(node: RoundProtocol | Tables) -> tuple[object, ...]:
    """Contents of all tables, regardless of their order."""
    return tuple(
        frozenset((key, _number(v)) for key, v in value.items())
        if isinstance(value, dict)
        else _describe(value)
        if isinstance(value, Tables)
        else tuple(map(_number, value))
        if isinstance(value, list)
        else _number(value)
        for value in vars(node).values()
    )


def signature(world: World) -> int:
    """A hash that is equal for worlds that cannot be told apart."""
    nodes = tuple(
        "dead" if name in world.dead else _number(node) for name, node in world.nodes.items()
    )
    mail = frozenset(Counter((a, b, _number(m), r) for a, b, m, r in world.flying).items())
    return hash((nodes, mail, world.budget, world.dead, world.frozen))


def explore(world: World, max_states: int) -> Iterator[World]:
    """Every reachable world once, depth first, up to `max_states` worlds."""
    _numbers.clear()
    seen: set[int] = set()
    stack = [world]
    # There are no reference cycles here, and the collector would scan all worlds again and again.
    gc.disable()
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
        _numbers.clear()


def walk(world: World, seed: int, mishap: float = 0.1) -> World:
    """The end of one random history. Each step is a mishap with this probability while the budget
    lasts.
    """
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


def settle(world: World) -> World:
    """Continue without mishaps: messages arrive, dead islands are noticed, lost messages are
    repeated.
    """
    world = copy(world)
    world.budget = Budget()
    direct = direct_islands(world)
    for _ in range(60):
        while found := events(world):
            world = step(world, found[-1])
        if world.is_over and not world.flying and agree(world):
            return world
        # The grace begins anew for an island that no longer relies on a coordinator.
        patient, direct = direct_islands(world) - direct, direct_islands(world)
        world = _pass_time(world, patient)
    return world


def direct_islands(world: World) -> frozenset[str]:
    """The islands that write to all."""
    return frozenset(name for name in world.live if world.nodes[name].coordination.is_direct)


def _pass_time(world: World, patient: frozenset[str]) -> World:
    """Let a second pass: all islands repeat their messages, send their status and, but for the
    patient, time out.
    """
    for name in world.live:
        world = step(world, ("repeat", name))
        node = world.nodes[name]
        for other in node.coordination.receivers(frozenset(world.live)) - {name}:
            world.flying += ((name, other, node.knowledge.status, False),)
    while world.flying:
        world = step(world, ("deliver", "0"))
    for name in world.live:
        state = world.nodes[name].state
        if state == "voting" or (state == "gathering" and name not in patient):
            world = copy(world)
            node = copy_node(world, name)
            think(world, node, is_late=True)
    return world


def agree(world: World) -> bool:
    """Whether all live islands hold the same state."""
    return len({(s.rank, s.digest) for s in map(world.status_of, world.live)}) <= 1


def forked(world: World, *, with_dead: bool = False) -> list[Commit]:
    """Commits of live islands, or of all, that differ from another island's commit on the same
    state.
    """
    by_base: dict[str, Commit] = {}
    wrong = []
    for c in world.commits:
        if c.island in world.dead and not with_dead:
            continue
        if by_base.setdefault(c.base, c).plan != c.plan:
            wrong.append(c)
    return wrong
