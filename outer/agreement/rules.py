"""What an island that is ready may find: a plan, that it is behind, that too few have come; and the rules for it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from outer.config import OuterConfig
from outer.errors import MessageError
from outer.rounds import Plan, Ready, Standing

GRACE_SHARE = 0.1
"""Of their inner steps' time, for which islands that give to a round wait for those that listen."""
NOTHING_TO_GIVE = {"listens": True, "tokens": 0, "weight": 0, "units": 0}
"""What a ready says of an island that listens."""


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
    refused: Callable[[Sequence[Ready]], Mapping[str, str]] = lambda readies: {}
    """Of islands that hold this island's state those that cannot be in one plan with the ones before, and why."""
    has_listeners: bool = False
    """Whether islands that still train take part; then `quorum` counts those that give."""
    grace_steps: float = 0.0
    """Those that give wait for those that listen as long as so many of their inner steps take."""


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


def rules_of(config: OuterConfig, num_parts: int, max_tokens: int) -> Rules:
    """The config's."""
    has_listeners = config.wait_for == "quorum"
    return Rules(
        quorum=config.quorum,
        start_islands=config.start_islands,
        below_quorum=config.below_quorum,
        num_parts=num_parts,
        max_tokens=max_tokens,
        # With listeners each may be of one inner step of one island.
        max_round=Rules.max_round if has_listeners else config.num_rounds,
        has_listeners=has_listeners,
        grace_steps=GRACE_SHARE * config.inner_steps / config.fragments,
    )


def majority(digests: Iterable[str]) -> str:
    """The digest that most hold; among equals the lowest."""
    counts = Counter(digests)
    return min(counts, key=lambda digest: (-counts[digest], digest))


def check_ready(ready: Ready, rules: Rules) -> None:
    """Raise MessageError when a peer's ready claims what cannot be."""
    ready.check(rules.num_parts)
    claimed = max(ready.tokens, ready.weight)
    if claimed > rules.max_tokens:
        raise MessageError(f"{ready.island!r} claims {claimed} tokens, a round has at most {rules.max_tokens}")
    if ready.listens and not rules.has_listeners:
        raise MessageError(f"{ready.island!r} listens, in a run that waits for all")


def objection(plan: Plan, own: Ready, rules: Rules, first_attempt: int = 0) -> str | None:
    """Why `own`'s island cannot take part in the plan, or None: it is there as it is now, all hold its state.

    `first_attempt`: the least for which it has given its word to no plan yet.
    """
    if plan.round != own.round:
        return f"the plan is for round {plan.round}, {own.island!r} is in round {own.round}"
    if plan.names != sorted(set(plan.names)):
        return "participants are repeated or out of order"
    # Renewed, when the planner's word that its ready is used came before the plan: the ready of that plan still holds.
    # One to listen holds, too, when the island has something to give by now: the next round gets it.
    held = own, own.model_copy(update=NOTHING_TO_GIVE)
    mine = [p.attempt for p in plan.participants if p.model_copy(update=_renewed(p, own)) in held]
    if not mine or not first_attempt <= mine[0] <= own.attempt:
        return f"{own.island!r} is not in the plan as it is now"
    if not plan.givers:
        return "nobody gives anything"
    for participant in plan.participants:
        if participant.digest != own.digest:
            return f"the state of {participant.island!r} differs from that of {own.island!r}"
        try:
            check_ready(participant, rules)
        except MessageError as error:
            return str(error)
    return next(iter(rules.refused(plan.participants).values()), None)


def _renewed(said: Ready, own: Ready) -> dict[str, int | float]:
    """What may have changed in an island's ready since it `said` so."""
    listening = {"step_seconds": own.step_seconds, "first": own.first} if said.listens else {}
    return {"attempt": own.attempt} | listening


def is_early(rules: Rules, agreeing: Collection[Ready], *, is_patient: bool) -> bool:
    """Whether those that give are too few yet, or, being patient, wait for those that still train and listen."""
    num_givers = sum(not ready.listens for ready in agreeing)
    if num_givers == len(agreeing):
        return False
    return is_patient or num_givers < min(rules.quorum, len(agreeing))


def find_behind(me: str, own: Standing, live: Mapping[str, Standing], *, is_settled: bool) -> Behind | None:
    """Whether another history than `own` survives among those that live. `is_settled`: all who count are in `live`."""
    best = max((*live.values(), own), key=lambda s: s.rank)
    rivals = {name: s.digest for name, s in live.items() if s.rank == best.rank}
    if best.rank == own.rank:
        if not is_settled:
            return None  # Those who have not spoken yet count in the majority, too.
        rivals[me] = own.digest
    digest = majority(rivals.values())
    if (best.rank, digest) == (own.rank, own.digest):
        return None
    donors = tuple(sorted(name for name, theirs in rivals.items() if theirs == digest))
    return Behind(
        donors,
        f"{', '.join(donors)} in round {best.round} with {best.tokens} tokens and digest {digest[:12]}; "
        f"this island in round {own.round} with {own.tokens} tokens and {own.digest[:12]}",
    )


def find_short(rules: Rules, num_ready: int, *, is_start: bool, is_late: bool) -> Short | None:
    """Whether too few islands are ready. `is_late`: nobody else is waited for."""
    if is_start and num_ready < rules.start_islands:
        return Short(num_ready, rules.start_islands, is_start=True)
    if num_ready >= rules.quorum or (is_late and rules.below_quorum == "continue"):
        return None
    return Short(num_ready, rules.quorum, is_start=False)
