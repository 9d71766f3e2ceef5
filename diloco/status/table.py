"""The state of a run as text: a line for the run, a table of its islands, their last events."""

import time
from collections.abc import Iterator

from diloco.formatting import (
    UNKNOWN,
    align,
    human_bytes,
    human_count,
    human_loss,
    human_seconds,
    one_line,
)
from diloco.records.figures import cells
from diloco.status.reply import MAX_EVENT_CHARACTERS
from diloco.status.run_status import RunStatus, SeenIsland

COLUMNS = ("island", "step", "round", "loss", "held-out", "tok/s", "ok/abort", "sent", "digest")


def format_run(run: RunStatus) -> Iterator[str]:
    """Yield all lines about a run."""
    yield from describe_overview(run)
    yield f"Run {run.name} at {run.where}: {describe_run(run)}"
    if not run.islands:
        yield "  no island is alive: start one, or wait for one to return"
        return
    yield from (
        f"  {line}"
        for line in align([COLUMNS, *(format_island(run, island) for island in run.islands)])
    )
    for island in run.islands:
        yield f"  {island.name}: {'; '.join(describe_island(island))}"
    yield f"  {describe_states(run)}"


def describe_overview(run: RunStatus) -> Iterator[str]:
    """Yield the first line, the line under it, and a line for each incident.

    Answers of islands tell less than their records: of them, the first line alone is made.
    """
    if run.overview is not None:
        yield from run.overview.head
        yield from (f"  {line}" for line in run.overview.lines)
    elif run.islands:
        yield describe_answers(run)
        yield (
            f"since: the last event of each island is below; `diloco watch {run.where}` "
            "collects their records"
        )


def describe_answers(run: RunStatus) -> str:
    """Return the first line about a run by the answers of its islands."""
    figures = [island.figures for island in run.islands if island.figures is not None]
    newest = max(figures, key=lambda each: each.round, default=None)
    words = [
        "training" if figures else "no island answers",
        f"round {run.round}" + (f" of {run.num_rounds}" if run.num_rounds else ""),
        f"held-out {human_loss(newest.heldout_loss if newest else None)}",
        f"{len(figures)} of {len(run.islands)} islands answer",
        f"{human_bytes(sum(each.bytes_sent for each in figures))} sent",
    ]
    return " · ".join(words)


def describe_run(run: RunStatus) -> str:
    """Return how many islands there are, and how far the most advanced one is."""
    of = f" of {run.num_rounds}" if run.num_rounds else ""
    learnt = "" if run.committed_tokens is None else f", {human_count(run.committed_tokens)} tokens"
    config = f", config {run.config_hash}" if run.config_hash else ""
    return (
        f"{len(run.islands)} island{'' if len(run.islands) == 1 else 's'}, {run.round}{of} "
        f"rounds{learnt}{config}"
    )


def format_island(run: RunStatus, island: SeenIsland) -> tuple[str, ...]:
    """Return one row of the table."""
    number = UNKNOWN if island.newest_round is None else str(island.newest_round)
    known = (
        {"island": island.name, "round": number}
        if island.figures is None
        else cells(island.figures, run.num_steps)
    )
    known["digest"] = island.digest[:8] or UNKNOWN
    return tuple(known.get(column, UNKNOWN) for column in COLUMNS)


def describe_island(island: SeenIsland) -> Iterator[str]:
    """Yield what the island is doing, where it runs, how it was reached, and its latest event."""
    yield one_line(island.state)
    if (status := island.status) is not None:
        device = f"{status.ranks} ranks on" if status.ranks > 1 else "on"
        mesh = f" ({one_line(status.mesh)})" if status.ranks > 1 else ""
        place = f"{one_line(status.host)}, {one_line(status.hardware)}{mesh}"
        yield f"{device} {place}, up {human_seconds(status.up_seconds)}"
        yield one_line(island.path)
    if (figures := island.figures) is not None and figures.event:
        ago = human_seconds(max(time.time() - figures.event_time, 0.0))
        yield f"{ago} ago: {figures.event[:MAX_EVENT_CHARACTERS]}"


def describe_states(run: RunStatus) -> str:
    """Return whether islands with equally many committed rounds hold the same state, as text."""
    digests = run.digests_by_round
    if not digests:
        return "No island has reported a digest yet."
    if differing := [number for number, found in digests.items() if len(set(found)) > 1]:
        rounds = ", ".join(map(str, sorted(differing)))
        return (
            f"States DIFFER after {rounds} rounds: the islands repair this themselves once "
            "they all reach each other."
        )
    told = ", ".join(
        f"{len(digests[number])} after {number} rounds" for number in sorted(digests, reverse=True)
    )
    return f"States are equal among islands that have committed equally many rounds: {told}."
