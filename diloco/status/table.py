"""The state of a run as text: a line for the run, a table of its islands, their last events."""

from collections.abc import Iterator

from diloco.formatting import UNKNOWN, align, human_bytes, human_count, human_loss, human_seconds, one_line
from diloco.status.run_status import RunStatus, SeenIsland

COLUMNS = ("island", "step", "round", "loss", "held-out", "tok/s", "ok/abort", "sent", "digest")
DIGITS = 8
"""Number of digits of a digest that are shown."""


def format_run(run: RunStatus) -> Iterator[str]:
    """Yield all lines about a run."""
    yield f"Run {run.name} at {run.where}: {describe_run(run)}"
    if not run.islands:
        yield "  no island is alive: start one, or wait for one to return"
        return
    yield from (f"  {line}" for line in align([COLUMNS, *(format_island(run, island) for island in run.islands)]))
    for island in run.islands:
        yield f"  {island.name}: {'; '.join(describe_island(island))}"
    yield f"  {describe_states(run)}"


def describe_run(run: RunStatus) -> str:
    """Return how many islands there are, and how far the most advanced one is."""
    ahead = max((island.round for island in run.islands if island.round is not None), default=0)
    of = f" of {run.num_rounds}" if run.num_rounds else ""
    tokens = max((island.status.tokens for island in run.islands if island.status is not None), default=None)
    learnt = "" if tokens is None else f", {human_count(tokens)} tokens"
    config = f", config {run.config_hash}" if run.config_hash else ""
    return f"{len(run.islands)} island{'' if len(run.islands) == 1 else 's'}, {ahead}{of} rounds{learnt}{config}"


def format_island(run: RunStatus, island: SeenIsland) -> tuple[str, ...]:
    """Return one row of the table."""
    training = island.training
    number = island.status.round if island.status is not None else island.round
    number = UNKNOWN if number is None else str(number)
    digest = island.digest[:DIGITS] or UNKNOWN
    if training is None:
        return (island.name, UNKNOWN, number, *[UNKNOWN] * 5, digest)
    return (
        island.name,
        f"{training.step}/{run.num_steps}" if run.num_steps else str(training.step),
        number,
        human_loss(training.loss),
        human_loss(training.heldout_loss),
        human_count(training.tokens_per_second),
        f"{training.committed}/{training.aborted}",
        human_bytes(training.bytes_sent),
        digest,
    )


def describe_island(island: SeenIsland) -> Iterator[str]:
    """Yield what the island is doing, where it runs, how it was reached, and its latest event."""
    yield one_line(island.state)
    if (status := island.status) is not None:
        device = f"{status.ranks} ranks on" if status.ranks > 1 else "on"
        mesh = f" ({one_line(status.mesh)})" if status.ranks > 1 else ""
        place = f"{one_line(status.host)}, {one_line(status.hardware)}{mesh}"
        yield f"{device} {place}, up {human_seconds(status.up_seconds)}"
        yield one_line(island.path)
    if (training := island.training) is not None and training.event:
        yield f"{human_seconds(training.event_seconds)} ago: {one_line(training.event)}"


def describe_states(run: RunStatus) -> str:
    """Return whether islands with equally many committed rounds hold the same state, as text."""
    digests = run.digests_by_round
    if not digests:
        return "No island has reported a digest yet."
    counts = {number: sum(i.round == number and bool(i.digest) for i in run.islands) for number in digests}
    if differing := [number for number, found in digests.items() if len(found) > 1]:
        rounds = ", ".join(map(str, sorted(differing)))
        return (
            f"States DIFFER after {rounds} rounds: the islands repair this themselves once they all reach each other."
        )
    told = ", ".join(f"{counts[number]} after {number} rounds" for number in sorted(digests, reverse=True))
    return f"States are equal among islands that have committed equally many rounds: {told}."
