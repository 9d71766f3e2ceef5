"""Show the prediction for a run beside the measurements of its islands, as text."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from diloco.formatting import UNKNOWN, human_bytes, human_duration, human_rate, one_line, percent

ROWS: list[tuple[str, str, Callable[[float], str]]] = [
    ("time per round", "round_seconds", human_duration),
    ("share of time in inner steps", "utilisation", percent),
    ("sent per island and round", "round_bytes", human_bytes),
    ("rate in a reduce", "reduce_rate", human_rate),
]
"""(name in the table, key in the prediction and in an island's state, format) of each row."""


def show_prediction(state: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a table and a line with its assumptions, or a line that says why there is no
    prediction.

    `state`: the state of a RunPrediction.
    """
    predicted = state["predicted"]
    if "unknown" in predicted:
        yield Text(f"no prediction: {one_line(predicted['unknown'])}")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "predicted", "measured"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in prediction_rows(state):
        table.add_row(*map(Text, row))
    yield table
    yield Text(f"assumed: {'; '.join(predicted['assumed'])}")


def prediction_rows(state: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield rows of a name, the predicted value, and the range of measured values over the
    islands.
    """
    p = state["predicted"]
    islands = state["islands"]
    for name, key, show in ROWS:
        values = [island[key] for island in islands if island[key] is not None]
        yield name, UNKNOWN if p[key] is None else show(p[key]), span(values, show)
    needed = "none is fast enough" if p["needed_rate"] is None else human_rate(p["needed_rate"])
    yield f"link needed for {100 * p['target']:.0f} % in inner steps", needed, ""
    if (left := state["num_rounds"] - state["round"]) > 0:
        times = [
            left * island["round_seconds"]
            for island in islands
            if island["round_seconds"] is not None
        ]
        yield (
            f"the {left} rounds to come",
            human_duration(left * p["round_seconds"]),
            span(times, human_duration),
        )
    law = "2503.09799, extrapolated" if p["is_extrapolated"] else "2503.09799"
    yield f"loss to data-parallel ({law})", signed(p["loss_gap"]), signed(state["loss_gap"])


def span(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Return the lowest and the highest value as text; only one of them if both have the same
    text.
    """
    ends = [show(min(values)), show(max(values))] if values else [UNKNOWN]
    return " to ".join(dict.fromkeys(ends))


def signed(share: float | None) -> str:
    """Return a difference in percent, as text."""
    return UNKNOWN if share is None else f"{100 * share:+.1f} %"
