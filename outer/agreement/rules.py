"""Rules that every island applies by itself: which ready messages and plans are valid, and which
history survives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from outer.agreement.messages import Plan, Ready, Status
from outer.config import OuterConfig
from outer.errors import MessageError
from outer.network.messages import do_shared
from outer.space.experts import RoutedClaims

MAX_AHEAD = 1 << 12
"""The most attempts by which a peer's message may raise this island's attempt number, so that
liars cannot use the numbers up."""
GRACE_SHARE = 0.1
"""Contributors wait for observers for this share of the duration of their inner steps."""
DIRECT_ISLANDS = 4
"""Up to this number of islands, all send their messages to each other. With more, one island
forwards the messages."""
TREE_ISLANDS = 128
FAN_OUT = 8
"""More than TREE_ISLANDS participants forward the plan and the list of votes, each of them to
FAN_OUT others."""
OBSERVER_FIELDS = {
    "listens": True,
    "tokens": 0,
    "weight": 0,
    "units": 0,
    "expert_tokens": 0,
    "expert_counts": [],
}
"""The values of these fields in an observer's ready message."""


@dataclass(frozen=True)
class Rules:
    """Conditions for a plan, and limits on what a peer may claim."""

    quorum: int = 1
    start_islands: int = 1
    below_quorum: Literal["wait", "continue", "stop"] = "wait"
    num_parts: int = 1
    max_tokens: int = 1 << 52
    """Maximum number of tokens that an island can train on in a round."""
    experts: RoutedClaims | None = None
    """What islands claim about their experts; None: nothing."""
    max_round: int = 1 << 29
    find_refusals: Callable[[Sequence[Ready]], Mapping[str, str]] = lambda readies: {}
    """Function that returns the islands excluded from a plan because they conflict with an
    earlier participant, with the reason."""
    has_observers: bool = False
    """Whether islands take part as observers while they train. In this case `quorum` counts
    contributors only."""
    grace_steps: float = 0.0
    """Contributors wait for observers for the duration of this number of inner steps."""
    direct_islands: int = DIRECT_ISLANDS
    tree_islands: int = TREE_ISLANDS
    fan_out: int = FAN_OUT


@dataclass(frozen=True)
class Behind:
    """Another history survives, and any of `donors` can provide its state. `text` describes both
    histories.
    """

    donors: tuple[str, ...]
    cause: str


def build_rules(
    config: OuterConfig, num_parts: int, max_tokens: int, experts: RoutedClaims | None = None
) -> Rules:
    has_observers = config.wait_for == "quorum"
    return Rules(
        quorum=config.quorum,
        start_islands=config.start_islands,
        below_quorum=config.below_quorum,
        num_parts=num_parts,
        max_tokens=max_tokens,
        experts=experts,
        # With observers a round may consist of one inner step of one island.
        max_round=Rules.max_round if has_observers else config.num_rounds,
        has_observers=has_observers,
        grace_steps=GRACE_SHARE * config.inner_steps / config.fragments,
    )


def check_ready(ready: Ready, rules: Rules) -> None:
    """Raise MessageError if a peer's ready message makes an impossible claim."""
    ready.check(rules.num_parts)
    claimed = max(ready.tokens, ready.weight)
    if claimed > rules.max_tokens:
        raise MessageError(
            f"{ready.island!r} claims {claimed} tokens, a round has at most {rules.max_tokens}"
        )
    if ready.listens and not rules.has_observers:
        raise MessageError(
            f"{ready.island!r} is an observer, but this run waits for all islands (outer.wait_for: "
            "all)"
        )
    if not ready.listens:
        _check_experts(ready, rules.experts, rules.max_tokens)


def _check_experts(ready: Ready, claims: RoutedClaims | None, max_tokens: int) -> None:
    """Raise MessageError if a contributor's claim about its experts is impossible."""
    sends = claims is not None and claims.sends(ready.round)
    most = claims.period * max_tokens if claims is not None and sends else 0
    if ready.expert_tokens > most:
        raise MessageError(
            f"{ready.island!r} claims {ready.expert_tokens} tokens of experts, at most {most} can "
            "be"
        )
    if claims is not None:
        claims.check(ready.island, ready.round, ready.expert_tokens, ready.expert_counts)
    elif ready.expert_counts:
        raise MessageError(
            f"{ready.island!r} claims counts of experts, which this run does not weigh by"
        )


def find_objection(plan: Plan, own: Ready, rules: Rules, first_attempt: int = 0) -> str | None:
    """Return the reason why the island of `own` cannot take part in the plan, or None if the plan
    is valid for it.

    `first_attempt`: the first attempt for which the island has not accepted a plan yet.
    """
    if plan.round != own.round:
        return f"the plan is for round {plan.round}, but {own.island!r} is in round {own.round}"
    if plan.names != sorted(set(plan.names)):
        return "participants are repeated or out of order"
    # The island may have renewed its ready message, because the planner's status arrived before
    # this plan. It may also have become a contributor: this plan still has it as an observer, and
    # its progress goes into the next round.
    valid = own, own.model_copy(update=OBSERVER_FIELDS)
    ours = [p for p in plan.participants if p.island == own.island]
    mine = [p.attempt for p in ours if p.model_copy(update=_mutable_fields(p, own)) in valid]
    if not mine or not first_attempt <= mine[0] <= own.attempt:
        return f"the plan does not contain the current ready message of {own.island!r}"
    if not plan.contributors:
        return "nobody gives anything"
    for participant in plan.participants:
        if participant.digest != own.digest:
            return f"the state of {participant.island!r} differs from that of {own.island!r}"
        try:
            check_ready(participant, rules)
        except MessageError as error:
            return str(error)
    if (
        plan.attempt != max(p.attempt for p in plan.participants)
        or plan.attempt > first_attempt + 2 * MAX_AHEAD
    ):
        return f"attempt {plan.attempt} does not follow from the participants' ready messages"
    # All participants hold this island's state, so all compute the same refusals.
    refusals = do_shared(("refusals", plan.id), lambda: rules.find_refusals(plan.participants))
    return next(iter(refusals.values()), None)


def _mutable_fields(planned: Ready, own: Ready) -> dict[str, int | float]:
    """Return the fields of the ready message `planned` that may differ from `own` by now, with
    their values in `own`.
    """
    observed = {"step_seconds": own.step_seconds, "first": own.first} if planned.listens else {}
    return {"attempt": own.attempt} | observed


def find_behind(
    me: str,
    own: Status,
    live: Mapping[str, Status],
    weigh: Callable[[Status], int],
    *,
    is_settled: bool,
) -> Behind | None:
    """Return the surviving history among live islands, or None if it is `own`. `is_settled`: `live`
    has all islands that count.

    `weigh`: the number of islands that support a state, which decides between histories of equal
    rank. Before the first commit there is no state that other islands could take.
    """
    best = max((*live.values(), own), key=lambda s: s.rank)
    if best.is_start:
        return None
    rivals = {name: s for name, s in live.items() if s.rank == best.rank}
    if best.rank == own.rank:
        if not is_settled:
            return None  # Islands that have not reported yet may change the majority.
        rivals[me] = own
    states = {s.claim: s for s in rivals.values()}
    best = (
        min(states.values(), key=lambda s: (-weigh(s), s.digest))
        if len(states) > 1
        else next(iter(states.values()))
    )
    if best.agrees_with(own):
        return None
    donors = tuple(sorted(name for name, theirs in rivals.items() if theirs.digest == best.digest))
    return Behind(
        donors,
        f"{', '.join(donors)} in round {best.round} with {best.tokens} tokens and digest "
        f"{best.digest[:12]}; "
        f"this island in round {own.round} with {own.tokens} tokens and {own.digest[:12]}",
    )
