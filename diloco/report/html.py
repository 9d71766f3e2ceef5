"""report.html: one page that shows what a run did. The plots are files beside it, the layout is
report.html.jinja.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from diloco.formatting import UNKNOWN, human_bytes, human_count, human_loss, human_seconds
from diloco.overview.overview import account_of
from diloco.overview.since import describe_time, find_since
from diloco.records.faults import FaultRecord
from diloco.records.run_folder import FACTS, IslandRecords, RunRecords
from diloco.report.island_table import island_rows
from diloco.report.summary import SUMMARY, Summary, total, traffic_ratio
from diloco.report.summary_table import describe_unread, summary_rows
from inner.files import write_atomically

REPORT = "report.html"
TEMPLATE = "report.html.jinja"
PLOT_FOLDER = "plots"
LINKED_FILES = ("config.yaml", SUMMARY, FACTS)
MAX_ABORTS_LISTED = 50
MAX_FAULTS_LISTED = 200
MAX_INCIDENTS_LISTED = 100
SUMMARY_COLUMNS = ("", "this run", "data-parallel baseline")
# Island names and causes of aborts come from peers: autoescape keeps them from being read as HTML.
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
)


class Tile(NamedTuple):
    """One of the large figures at the top of the page; `look` is empty, `good` or `wrong`."""

    label: str
    value: str
    more: str
    look: str = ""


class Figure(NamedTuple):
    """A plot, or the note that says why there is none."""

    title: str
    caption: str
    path: str
    note: str | None


class TextTable(NamedTuple):
    """A titled table whose last two columns are running text. It is left out of the page when it
    has no rows.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_omitted: int = 0


def write_report(run: RunRecords, summary: Summary, out: Path | None = None) -> Path:
    """Draw the plots, write report.html into `out`, by default the run's folder, and return its
    path.
    """
    out = out or run.run_dir
    # Imported late because matplotlib takes a second to import, and `diloco simulate` imports this
    # module.
    from diloco.report.plots import PLOTS, write_plots

    notes = write_plots(run, out / PLOT_FOLDER)
    figures = [
        Figure(p.title, p.caption, f"{PLOT_FOLDER}/{p.stem}.png", notes[p.stem]) for p in PLOTS
    ]
    path = out / REPORT
    write_atomically(path, render(run, summary, figures, out))
    return path


def render(run: RunRecords, summary: Summary, figures: Sequence[Figure], out: Path) -> str:
    """Return the whole page as HTML. It will be a file in `out`."""
    num_columns = 3 if summary["baseline"] else 2
    islands = island_rows(run.islands)
    return TEMPLATES.get_template(TEMPLATE).render(
        name=summary["name"],
        subtitle=_subtitle(run, summary),
        head=[summary["headline"], summary["since"]],
        unread=describe_unread(summary),
        tiles=_tiles(summary),
        summary_columns=SUMMARY_COLUMNS[:num_columns],
        summary_rows=[row[:num_columns] for row in summary_rows(summary)],
        figures=figures,
        island_columns=list(islands[0]) if islands else [],
        island_rows=[list(row.values()) for row in islands],
        incidents=_incident_table(run),
        text_tables=[
            _fault_table(run.faults),
            _abort_table(run.islands),
            _event_table(run.islands),
        ],
        files=[name for name in LINKED_FILES if (out / name).is_file()],
    )


def _subtitle(run: RunRecords, summary: Summary) -> str:
    islands = f"{summary['num_islands']} island" + ("" if summary["num_islands"] == 1 else "s")
    facts = run.facts
    if facts is None:
        return f"{islands}; no {FACTS}, so the model's size is not known"
    begun = f", begun {facts.created[:16].replace('T', ' ')} UTC" if facts.created else ""
    return f"{human_count(facts.num_params)} parameters on {islands}{begun}"


def _tiles(summary: Summary) -> list[Tile]:
    ratio = summary["loss_ratio"]
    traffic = traffic_ratio(summary)
    reference = (
        f"{(ratio - 1) * 100:+.1f} % to data-parallel" if ratio else _bigram_reference(summary)
    )
    look, digests = {None: ("", UNKNOWN), True: ("good", "equal"), False: ("wrong", "DIFFERENT")}[
        summary["digests_equal"]
    ]
    if summary["final_eval_losses"] is not None:
        look = ""
        digests = "their own"
        reference = f"mean of islands; {reference}"
    sent = total(summary["bytes_sent"])
    would_have = total(summary["data_parallel_bytes"])
    scope = (
        f"{human_bytes(sent)} instead of {human_bytes(would_have)}"
        if would_have
        else "by all islands together"
    )
    disagreeing = ", ".join(map(str, summary["rounds_disagreeing"][:8]))
    return [
        Tile("Held-out loss", human_loss(summary["final_eval_loss"]), reference),
        Tile("Bytes sent", f"{traffic:.1f}x less" if traffic else human_bytes(sent), scope),
        Tile(
            "Rounds committed",
            str(summary["rounds_committed"]),
            f"attempts aborted: {summary['rounds_aborted']}",
        ),
        Tile(
            "Digests of all islands",
            digests,
            f"rounds {disagreeing}" if disagreeing else _digest_scope(summary),
            look,
        ),
    ]


def _digest_scope(summary: Summary) -> str:
    if summary["islands_unread"]:
        return (
            f"in every committed round, of {summary['islands_read']} of "
            f"{summary['num_islands']} islands"
        )
    return "in every committed round"


def _bigram_reference(summary: Summary) -> str:
    bigram = summary["bigram_loss"]
    return "nats per token" if bigram is None else f"byte bigram model {bigram:.3f}"


def _incident_table(run: RunRecords) -> TextTable:
    account = account_of(run)
    found = find_since(account, 0.0)
    rows = [
        (
            describe_time(i.time, account.last),
            f"{i.island or 'run'}: {i.kind}",
            str(i.count),
            i.cause,
            i.cure,
        )
        for i in found[:MAX_INCIDENTS_LISTED]
    ]
    columns = ("last", "what", "times", "cause", "cure")
    return TextTable(
        "What happened, the worst first", columns, rows, max(len(found) - MAX_INCIDENTS_LISTED, 0)
    )


def _fault_table(faults: Sequence[FaultRecord]) -> TextTable:
    rows = [
        (human_seconds(fault.time - faults[0].time), fault.spec, fault.text) for fault in faults
    ]
    columns = ("after the first", "fault", "what happened")
    return TextTable(
        "Faults", columns, rows[:MAX_FAULTS_LISTED], max(len(rows) - MAX_FAULTS_LISTED, 0)
    )


def _abort_table(islands: Sequence[IslandRecords]) -> TextTable:
    rows = [
        (str(record.round), str(record.attempt), island.name, record.cause or UNKNOWN)
        for island in islands
        for record in island.rounds
        if not record.committed
    ]
    columns = ("round", "attempt", "seen by", "cause")
    return TextTable(
        "Aborted attempts", columns, rows[:MAX_ABORTS_LISTED], max(len(rows) - MAX_ABORTS_LISTED, 0)
    )


def _event_table(islands: Sequence[IslandRecords]) -> TextTable:
    rows = [(island.name, event.name, event.text) for island in islands for event in island.events]
    return TextTable("Events", ("island", "event", ""), rows[-MAX_ABORTS_LISTED:])
