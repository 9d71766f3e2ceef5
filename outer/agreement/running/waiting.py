"""Reports which islands an island waits for, and why, when a gathering or a vote makes no
progress.
"""

import logging
from collections.abc import Callable, Mapping

from outer.agreement.messages import Plan
from outer.agreement.planner import TooFew
from outer.agreement.state_machine import RoundProtocol
from outer.report import Waiting

log = logging.getLogger(__name__)

REPORT_SECONDS = 5.0
"""Interval between two reports of a wait that makes no progress."""


class WaitReporter:
    """Logs a wait every REPORT_SECONDS, and passes it to `on_wait`, which is called with None
    when the wait is over.
    """

    def __init__(self, started: float, on_wait: Callable[[Waiting | None], None]) -> None:
        self._reported_at = started
        self._on_wait = on_wait
        self._has_reported = False

    def report(self, now: float, build: Callable[[], Waiting]) -> None:
        """Report the wait if it is time to do so. `now` is in seconds of the event loop's clock."""
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self._has_reported = True
            waiting = build()
            log.info("%s", waiting)
            self._on_wait(waiting)

    def end(self) -> None:
        if self._has_reported:
            self._on_wait(None)


def describe_gathering(
    protocol: RoundProtocol,
    decision: object,
    losses: Mapping[str, str],
    seconds: float,
    *,
    is_late: bool,
) -> Waiting:
    """Return the islands for which the gathering waits, with the reasons.

    `decision`: the last result of `RoundProtocol.try_plan`. `losses`: causes of the losses, by
    island.
    """
    cause = (
        f"{decision.present} of {decision.needed} islands are here"
        if isinstance(decision, TooFew)
        else ""
    )
    knowledge = protocol.knowledge
    excluded = protocol.gathering.excluded
    islands = {}
    if knowledge.me in excluded:
        cause = f"this island is left out: {excluded[knowledge.me]}"
    if protocol.coordination.is_led:
        why = (
            f"it reports that {protocol.coordination.num_ready} of {len(knowledge.awaited) + 1} "
            "islands are ready"
        )
        islands[protocol.coordination.coordinator] = why
        return Waiting(knowledge.status.round, "gathering", seconds, islands, cause)
    for name in knowledge.present:
        why = (
            f"it is left out: {excluded[name]}"
            if name in excluded
            else _why_not_ready(protocol, name, losses)
        )
        if why:
            islands[name] = why
    planner = protocol.gathering.find_planner(is_late=is_late)
    if planner is not None and planner != knowledge.me and not cause:
        islands.setdefault(planner, "it is to make the plan")
    return Waiting(knowledge.status.round, "gathering", seconds, islands, cause)


def describe_vote(protocol: RoundProtocol, plan: Plan, seconds: float) -> Waiting:
    """Return the islands whose vote, or whose receipt of this island's vote, is missing."""
    votes = protocol.vote_table.votes
    islands = {}
    if not protocol.exchange.is_direct and plan.planner != protocol.knowledge.me:
        return Waiting(
            plan.round, "voting", seconds, {plan.planner: "it has not forwarded the votes of all"}
        )
    for name in protocol.vote_table.pending(plan) - {protocol.knowledge.me}:
        missing = (
            "it has not acknowledged this island's vote"
            if (plan.id, name) in votes
            else "it has not voted"
        )
        islands[name] = "it is lost" if name in protocol.knowledge.lost else missing
    return Waiting(plan.round, "voting", seconds, islands)


def explain_abort(protocol: RoundProtocol, plan: Plan) -> tuple[str, dict[str, str]]:
    """Return why the plan was not committed, and the islands that are left out of the next plan,
    with the reasons.
    """
    table = protocol.vote_table.votes
    votes = [vote for name in plan.names if (vote := table.get((plan.id, name)))]
    suspects = protocol.suspicions.excluded(plan.round, table)
    said = {vote.island: vote.cause for vote in votes if vote.digest is None}
    if not said and len({vote.digest for vote in votes}) > 1:
        said = {vote.island: f"digest {vote.digest}" for vote in votes}
    said = said or {name: "it is lost" for name in plan.names if name in protocol.knowledge.lost}
    causes = sorted((said | suspects).items())
    return "; ".join(f"{name}: {why}" for name, why in causes) or "a vote is missing", suspects


def _why_not_ready(protocol: RoundProtocol, name: str, losses: Mapping[str, str]) -> str:
    """Return why an island of the run takes no part in the gathering; empty if it does."""
    knowledge = protocol.knowledge
    status = knowledge.statuses.get(name)
    own = knowledge.status
    if name in knowledge.lost:
        return f"it is lost: {losses.get(name, 'it does not answer')}"
    if name not in knowledge.awaited:
        return "it claims to be ahead, but its state could not be taken"
    ready = protocol.readies.usable(own.round, [name]).get(name)
    if ready is None:
        if status is None:
            return "it has not sent its status yet"
        if not status.is_coming:
            return "it is taking another island's state, or is leaving"
        return "it is not ready" if status.round == own.round else f"it is in round {status.round}"
    if ready.digest != own.digest:
        return f"its state differs: digest {ready.digest[:12]}, here {own.digest[:12]}"
    return "it is still training, as an observer" if ready.listens else ""
