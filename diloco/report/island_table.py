"""A table of a run's islands: what each contributed to the mean, and how long it waited."""

from collections.abc import Sequence

from diloco.formatting import UNKNOWN, human_bytes, human_count, human_seconds, one_line
from diloco.records.run_folder import IslandRecords

SHORT = ("island", "inner steps", "tokens/s", "contributed", "computing", "waited", "sent")
"""Columns on the console."""


def island_rows(islands: Sequence[IslandRecords]) -> list[dict[str, str]]:
    """Return one row for each island, by column.

    `contributed` is the island's tokens in committed rounds, which are its weight in the mean, and
    their share of all islands' tokens. `computing` is the share of its time in inner steps, and
    `waited` its time waiting for other islands before a reduce began.
    """
    whole = sum(map(count_contributed, islands))
    return [_row(island, whole) for island in islands]


def short_rows(islands: Sequence[IslandRecords]) -> list[Sequence[str]]:
    """Return the columns SHORT with their names, for the console."""
    return [SHORT, *([one_line(row[name]) for name in SHORT] for row in island_rows(islands))]


def count_contributed(island: IslandRecords) -> int:
    """Count the tokens that the island has contributed to committed rounds."""
    return sum(record.tokens for record in island.rounds if record.committed)


def computing_share(island: IslandRecords) -> float | None:
    """Return the share of the island's time in inner steps, from 0 to 1. None without inner
    steps.
    """
    if not island.steps:
        return None
    spans = island.spans
    seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    return min(island.latest.figures.step_seconds / seconds, 1.0) if seconds > 0 else None


def _row(island: IslandRecords, whole: int) -> dict[str, str]:
    figures = island.latest.figures
    seconds = figures.step_seconds
    speed = (
        sum(s.tokens_per_second * s.seconds for s in island.steps) / seconds if seconds else None
    )
    contributed = count_contributed(island)
    computing = computing_share(island)
    return {
        "island": island.name,
        "inner steps": str(len(island.steps)),
        "skipped": str(sum(step.skipped for step in island.steps)),
        "tokens": human_count(figures.tokens),
        "tokens/s": human_count(speed),
        "committed": str(figures.committed),
        "contributed": f"{human_count(contributed)} ({contributed / whole:.1%})"
        if whole
        else UNKNOWN,
        "sent": human_bytes(figures.bytes_sent),
        "received": human_bytes(figures.bytes_received),
        "computing": UNKNOWN if computing is None else f"{computing:.0%}",
        "waited": human_seconds(figures.wait_seconds),
    }
