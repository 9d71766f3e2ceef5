"""The first line about a run: is it training, is it learning, what did it cost, when will it be
done?
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diloco.formatting import human_bytes, human_duration, human_loss
from diloco.overview.account import IslandAccount, RunAccount
from diloco.overview.activities import find_shares
from diloco.overview.traffic import data_parallel_bytes_per_step
from diloco.records.figures import combine
from diloco.records.kept_config import RunPlan

OVER_SECONDS = 600.0
"""A run without a record for this time is over: its state at its last record is told."""
HOUR = 3600.0
LEAST_SHARE = 0.005
"""Smaller shares of time are not told."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The figures of the first line; None for what is not known."""

    state: str
    """What the run does, in words."""
    is_trouble: bool
    round: int
    num_rounds: int | None
    stage: str
    """The newest stage of the run, as `2 of 3`; empty without stages, and in the first one."""
    heldout_loss: float | None
    loss_change: float | None
    """Difference of the held-out loss to the one `change_seconds` earlier."""
    change_seconds: float
    """An hour, or the time since the first evaluation if that is shorter."""
    islands_in: int
    """Islands in the last committed round."""
    islands_expected: int
    shares: Mapping[str, float]
    """Shares of the islands' time by activity; empty if not known."""
    slowest: str | None
    """The island for which the others waited longest in the newest rounds."""
    bytes_sent: int
    traffic_ratio: float | None
    """How many times as many bytes data-parallel training would have sent."""
    ends_in_seconds: float | None
    """Time to the end of the run at the present pace."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures and the line as values for JSON."""
        return asdict(self) | {"text": describe(self)}


def find_headline(account: RunAccount, plan: RunPlan, at: float) -> Headline:
    """Return the figures of the first line at unix time `at`."""
    run = combine([island.latest for island in account.islands.values()])
    names = account.last_commit[0] if account.last_commit else ()
    is_over = at - account.last > OVER_SECONDS or all(
        island.is_away for island in account.islands.values()
    )
    loss_change, change_seconds = find_loss_change(account)
    until = None if is_over else at
    seconds = [
        island.seconds(until if island.is_away and not island.is_over else None)
        for island in living(account)
    ]
    state, is_trouble = describe_state(account, plan, at)
    left = None if plan.num_rounds is None else max(plan.num_rounds - run.round, 0)
    pace = [
        row[1]
        for island in account.islands.values()
        if (row := island.pace.now) is not None and row[1]
    ]
    return Headline(
        state=state,
        is_trouble=is_trouble,
        round=run.round,
        num_rounds=plan.num_rounds,
        stage=account.stages[max(account.stages)] if account.stages else "",
        heldout_loss=run.heldout_loss,
        loss_change=loss_change,
        change_seconds=change_seconds,
        islands_in=len(names),
        islands_expected=len(find_expected(account, plan)),
        shares=find_shares(seconds),
        slowest=account.find_slowest(),
        bytes_sent=run.bytes_sent,
        traffic_ratio=find_traffic_ratio(account, plan, run.bytes_sent),
        ends_in_seconds=left * max(pace)
        if left and pace and state in ("training", "waiting")
        else None,
    )


def living(account: RunAccount) -> list[IslandAccount]:
    """Return the islands that have recorded anything."""
    return [island for island in account.islands.values() if island.times.first is not None]


def describe_state(account: RunAccount, plan: RunPlan, at: float) -> tuple[str, bool]:
    """Return in words what the run does at unix time `at`, and whether that is a problem."""
    islands = living(account)
    if not islands:
        return "not started", False
    if any(island.is_over for island in islands):
        return "done", False
    present = [island for island in islands if not island.is_away]
    if not present:
        is_failure = any(island.absences[-1].is_failure for island in islands)
        return ("ended by a failure", True) if is_failure else ("stopped", False)
    silent = at - max(island.times.last for island in present)
    if silent > OVER_SECONDS:
        return f"silent for {human_duration(silent)}", True
    if all(island.is_waiting for island in present):
        return "waiting", True
    if account.last_commit is None:
        return "training, before its first commit", False
    return "training", False


def find_expected(account: RunAccount, plan: RunPlan) -> set[str]:
    """Return the islands that should be in the next round: all known ones except those that were
    asked to leave.
    """
    known = account.known | account.islands.keys()
    last = set(account.last_commit[0]) if account.last_commit else set[str]()
    asked = {
        name
        for name, island in account.islands.items()
        if island.is_away
        and not island.is_over
        and not island.absences[-1].is_failure
        and name not in last
    }
    missing = (plan.config.outer.start_islands if plan.config else 0) - len(known)
    return (known - asked) | {
        f"island {number} that has not come" for number in range(max(missing, 0))
    }


def find_loss_change(account: RunAccount) -> tuple[float | None, float]:
    """Return the change of the held-out loss in the last hour, and over how many seconds it is."""
    known = sorted(account.losses.values())
    if len(known) < 2:
        return None, 0.0
    time, loss = known[-1]
    before, earlier = next((each for each in reversed(known) if each[0] <= time - HOUR), known[0])
    return loss - earlier, time - before


def find_traffic_ratio(account: RunAccount, plan: RunPlan, sent: int) -> float | None:
    """Return data-parallel training's bytes divided by the run's; None if either is not known."""
    if plan.facts is None or not sent:
        return None
    num_islands = max(plan.facts.num_islands, len(account.islands))
    per_step = data_parallel_bytes_per_step(plan.facts.num_params, num_islands)
    would_have = sum(round(per_step * island.num_steps) for island in account.islands.values())
    return would_have / sent or None


def describe(line: Headline) -> str:
    """Return the first line as text."""
    of = f" of {line.num_rounds}" if line.num_rounds else ""
    words = [
        line.state,
        f"round {line.round}{of}",
        f"stage {line.stage}" if line.stage else "",
        f"held-out {human_loss(line.heldout_loss)}{describe_change(line)}",
        f"{line.islands_in} of {line.islands_expected} islands",
        describe_shares(line.shares, line.slowest),
        f"{human_bytes(line.bytes_sent)} sent"
        + (f", {line.traffic_ratio:.1f}x less" if line.traffic_ratio else ""),
        f"done in {human_duration(line.ends_in_seconds)}" if line.ends_in_seconds else "",
    ]
    return " · ".join(filter(None, words))


def describe_change(line: Headline) -> str:
    """Return the change of the held-out loss as text; empty if it is not known."""
    if line.loss_change is None:
        return ""
    return f" ({line.loss_change:+.4f} in {human_duration(line.change_seconds)})"


def describe_shares(shares: Mapping[str, float], slowest: str | None) -> str:
    """Return shares of time as text, with the island for which the others waited longest."""
    notes = {"waiting": f" (most for {slowest})" if slowest else ""}
    told = {
        name: f"{name} {100 * share:.0f} %"
        for name, share in shares.items()
        if share >= LEAST_SHARE
    }
    return ", ".join(text + notes.get(name, "") for name, text in told.items())
