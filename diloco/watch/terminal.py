"""Show runs in the terminal: the content of the page as text."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diloco.formatting import one_line
from diloco.records.figures import cells
from diloco.records.metrics import LOST
from diloco.watch.prediction_table import show_prediction
from diloco.watch.view.attempts import Attempt, find_attempts, find_stragglers
from diloco.watch.view.prediction import RunPrediction
from diloco.watch.view.run_view import RunView

UPDATE_SECONDS = 1.0
PLAIN_WIDTH = 200
"""Width of a line where no terminal reports its width."""
COLUMNS = (
    "island",
    "state",
    "step",
    "round",
    "loss",
    "held-out",
    "tok/s",
    "ok/abort",
    "sent",
    "digest",
)
LINES_SHOWN = 8
ROUNDS_SHOWN = 4


def show_text(views: Sequence[RunView]) -> None:
    """Show the runs one below the other: on a terminal until Ctrl-C, otherwise once."""
    console = Console()
    if not console.is_terminal:
        Console(width=PLAIN_WIDTH).print(Group(*map(render, map(RunPrediction, views))))
        return
    predictions = list(map(RunPrediction, views))
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while True:
            live.update(Group(*map(render, predictions)), refresh=True)
            time.sleep(UPDATE_SECONDS)


def render(prediction: RunPrediction) -> Group:
    """Return a table of the islands, and below it the prediction and the latest events."""
    view = prediction.view
    view.read()
    state = prediction.state()
    table = Table(
        title=Text(state["name"]),
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for number, column in enumerate(COLUMNS):
        table.add_column(
            column, justify="left" if number < 2 else "right", no_wrap=True, overflow="ellipsis"
        )
    for island in state["islands"]:
        shown = cells(view.islands[island["name"]].latest.figures, state["total_steps"]) | {
            "state": island["state"]
        }
        table.add_row(
            *(Text(shown[column]) for column in COLUMNS),
            style="red" if island["is_wrong"] else None,
        )
    lines = [
        *map(format_attempt, find_attempts(view, ROUNDS_SHOWN)),
        *find_stragglers(view.islands),
        *last_lines(view),
    ]
    texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
    head = [
        Text(state["headline"]["text"], style="bold"),
        Text(state["since"]),
        *map(Text, state["incidents"]),
    ]
    return Group(*head, table, *show_prediction(state), *texts)


def format_attempt(attempt: Attempt) -> str:
    """Return one attempt as a line."""
    result = "committed" if attempt.digests else "aborted"
    late = f"last to come {attempt.last_to_come}" if attempt.last_to_come else ""
    words = [
        f"{result} on {len(attempt.rows)}",
        attempt.cause,
        " != ".join(d[:8] for d in sorted(attempt.digests)),
        late,
    ]
    return (
        f"round {attempt.round} attempt {attempt.attempt}: "
        f"{', '.join(filter(None, [*words, *attempt.notes]))}"
    )


def last_lines(view: RunView) -> Iterator[str]:
    """Yield the latest lines of logbook, events, faults and visits, the newest last."""
    rows = [(time, f"{name} {text}") for time, name, text in view.notes]
    booked = {name for _, name, _ in view.notes}
    for name, island in view.islands.items():
        # Events and presence are added because the logbook lacks events of islands elsewhere and
        # what islands noted about others.
        events = [
            row
            for row in island.rows["events"]
            if name not in booked or row[1] in (LOST, "downloading")
        ]
        rows += [(row[0], f"{name} {row[1]}: {row[2]}") for row in events]
        rows += [
            (row[0], f"{name} {'answers' if row[1] else f'no answer: {row[2]}'}")
            for row in island.rows["presence"]
        ]
    rows += [(row[0], f"fault {row[1]}: {row[3]}") for row in view.faults]
    for at, text in sorted(rows)[-LINES_SHOWN:]:
        yield f"{time.strftime('%H:%M:%S', time.gmtime(at))}Z {one_line(text)}"
