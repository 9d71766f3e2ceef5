"""A live view of all islands of a run, read from the files that they write."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.formatting import human_bytes, human_count, human_loss, human_seconds, one_line
from diloco.records.faults import FaultRecord, read_faults
from diloco.records.figures import IslandFigures, LatestRecords, cells, combine
from diloco.records.run_folder import METRICS, Tail
from diloco.runtime.processes import Child

PLAIN_LINE_SECONDS = 5.0
FAULTS_SHOWN = 3
LOSSES_SHOWN = 6
COLUMNS = ("island", "step", "loss", "tok/s", "round", "peers", "ok/abort", "sent", "held-out")


@dataclass
class RunState:
    """The islands of a run. `total_steps`: number of inner steps planned for each island."""

    islands: list[LatestRecords]
    total_steps: int
    seconds: float = 0.0
    faults: list[FaultRecord] = field(default_factory=list)


def table_rows(state: RunState) -> list[tuple[str, ...]]:
    """Return one row of text for each island: COLUMNS, then its last event."""
    islands = [island.figures for island in state.islands]
    rows = [(cells(island, state.total_steps), island.event or "") for island in islands]
    return [(*(shown[column] for column in COLUMNS), event) for shown, event in rows]


class Dashboard:
    """A table that redraws itself on a terminal. Elsewhere it prints a status line at each round or
    every few seconds.

    Use it as a context manager and call `update` a few times per second.
    """

    def __init__(
        self,
        run_dir: Path,
        islands: Sequence[str],
        total_steps: int,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(highlight=False)
        """The console for everything else that is printed while the dashboard is shown."""
        self.state = RunState([LatestRecords(name) for name in islands], total_steps)
        self._title = run_dir.name
        self._run_dir = run_dir
        self._tails = [Tail(run_dir / name / METRICS) for name in islands]
        self._clock = clock
        self._started_at = clock()
        self._last_line_at = self._started_at
        can_redraw = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = Live(console=self.console, auto_refresh=False) if can_redraw else None

    def __enter__(self) -> "Dashboard":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Show the final state and release the terminal."""
        self.update(is_last=True)
        if self._live:
            self._live.stop()

    def add_island(self, name: str) -> None:
        """Add an island to the table unless it is already there."""
        if all(island.figures.name != name for island in self.state.islands):
            self.state.islands.append(LatestRecords(name))
            self._tails.append(Tail(self._run_dir / name / METRICS))

    def update(self, *, is_last: bool = False) -> None:
        """Read the new records of all islands and show them. Does not block."""
        rounds_before = self._rounds_decided()
        num_faults = len(self.state.faults)
        events_before = [island.figures.event for island in self.state.islands]
        self.state.faults = read_faults(self._run_dir)
        for island, tail in zip(self.state.islands, self._tails, strict=True):
            for record in tail.new_records():
                island.write(record)
        self.state.seconds = self._clock() - self._started_at
        if self._live:
            self._live.update(render_table(self._title, self.state), refresh=True)
            return
        for fault in self.state.faults[num_faults:]:
            self._print(format_fault(fault))
        self._print_events(events_before)
        is_due = self._clock() - self._last_line_at >= PLAIN_LINE_SECONDS
        if is_last or is_due or self._rounds_decided() > rounds_before:
            self._last_line_at = self._clock()
            self._print(format_status_line(self.state))

    def _rounds_decided(self) -> int:
        # Only the most advanced island counts, so that a round prints one line and not one line per
        # island.
        return max((i.figures.committed + i.figures.aborted for i in self.state.islands), default=0)

    def _print_events(self, before: Sequence[str | None]) -> None:
        for island, old in zip(self.state.islands, before, strict=True):
            if island.figures.event != old:
                self._print(f"{island.figures.name} {island.figures.event or ''}")

    def _print(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)


def render_table(title: str, state: RunState) -> Group:
    """Render the table of all islands, with their last events and the last faults below the
    table.
    """
    table = Table(
        title=Text(f"{title}  {human_seconds(state.seconds)}"),
        title_justify="left",
        title_style="bold",
        padding=(0, 1, 0, 0),
        box=None,
        header_style="dim",
    )
    table.add_column(COLUMNS[0], no_wrap=True, overflow="ellipsis")
    table.add_column("", width=10)
    for column in COLUMNS[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    lines: list[Text] = []
    for island, row in zip(state.islands, table_rows(state), strict=True):
        bar = ProgressBar(total=max(state.total_steps, 1), completed=island.figures.step, width=10)
        table.add_row(
            Text(row[0], style="cyan"), bar, *(Text(cell) for cell in row[1 : len(COLUMNS)])
        )
        if row[-1]:
            lines.append(
                Text(f"{row[0]} {row[-1]}", style="yellow", no_wrap=True, overflow="ellipsis")
            )
    lines += [
        Text(format_fault(fault), style="red", no_wrap=True)
        for fault in state.faults[-FAULTS_SHOWN:]
    ]
    return Group(table, *lines)


def format_fault(fault: FaultRecord) -> str:
    """Format a fault as one line of plain text."""
    return one_line(f"fault {fault.spec}: {fault.text}")


def print_failure(child: Child, console: Console) -> None:
    """Print a failed child's exit status and an excerpt of its errors."""
    console.print(f"{child.name} ended with status {child.exit_code}; from {child.log}:")
    console.print(child.error_excerpt(), markup=False, highlight=False, soft_wrap=True)


def format_status_line(state: RunState) -> str:
    """Format the state of the run as one line of plain text."""
    run = combine(state.islands)
    return (
        f"[{human_seconds(state.seconds)}] step {run.step}/{state.total_steps} | round {run.round}"
        f" | {run.committed} committed {run.aborted} aborted"
        f" | loss {format_losses([island.figures for island in state.islands])}"
        f" | held-out {human_loss(run.heldout_loss)} | {human_count(run.tokens_per_second)} tok/s"
        f" | sent {human_bytes(run.bytes_sent)}"
    )


def format_losses(islands: Sequence[IslandFigures]) -> str:
    """Return each island's training loss, or the range if there are more than LOSSES_SHOWN
    islands.
    """
    known = [island.loss for island in islands if island.loss is not None]
    if len(islands) <= LOSSES_SHOWN or not known:
        return " ".join(human_loss(island.loss) for island in islands[:LOSSES_SHOWN])
    return f"{human_loss(min(known))} to {human_loss(max(known))}"
