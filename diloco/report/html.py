"""report.html: one page that says what a run did, with its plots as files beside it."""

import html
from collections.abc import Sequence
from pathlib import Path

from diloco.faults import FaultRecord, read_faults
from diloco.metrics import RoundRecord
from diloco.runfiles import FACTS, IslandRecords, RunRecords, read_run, write_atomically
from diloco.summary import SUMMARY, Summary, summarise_records, total, traffic_ratio
from diloco.summary_table import summary_rows
from diloco.units import UNKNOWN, human_bytes, human_count, human_loss, human_seconds

REPORT = "report.html"
PLOT_FOLDER = "plots"
MAX_ABORTS_LISTED = 50
MAX_FAULTS_LISTED = 200
STYLE = """
:root { color-scheme: light; --ink: #22252b; --dim: #5c6370; --line: #e4e6ea; --good: #00704f; --wrong: #b34700; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 4rem; background: #fff; color: var(--ink);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .6rem; }
p.sub, figcaption, .note { color: var(--dim); }
p.sub { margin: .25rem 0 1.6rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .8rem; }
.tile { border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
.tile .label { color: var(--dim); font-size: .85rem; }
.tile .value { font-size: 1.55rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile .more { font-size: .85rem; color: var(--dim); }
.good { color: var(--good); } .wrong { color: var(--wrong); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .38rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--dim); font-weight: 600; font-size: .85rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th.text, td.text { text-align: left; white-space: normal; }
figure { margin: 2.2rem 0 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption { font-size: .9rem; margin-top: .35rem; }
.note { border: 1px dashed var(--line); border-radius: .6rem; padding: 1.2rem; }
footer { margin-top: 3rem; color: var(--dim); font-size: .9rem; }
a { color: #0072b2; }
"""


def write_report(run_dir: Path) -> Path:
    """Draw the plots, write report.html, return its path. Raises InputError when there is no run."""
    run = read_run(run_dir)
    # Here, not above: matplotlib takes a second to import, and the command line imports this file.
    from diloco.plots import PLOTS, write_plots

    notes = write_plots(run, run_dir / PLOT_FOLDER)
    figures = [_figure(plot.title, plot.caption, plot.stem, notes[plot.stem]) for plot in PLOTS]
    path = run_dir / REPORT
    write_atomically(path, page(run, summarise_records(run), figures))
    return path


def page(run: RunRecords, summary: Summary, figures: Sequence[str]) -> str:
    """The whole page; `figures` are HTML already."""
    name = html.escape(summary["name"])
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name} - run report</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            f"<h1>{name}</h1>\n<p class='sub'>{html.escape(_subtitle(run, summary))}</p>",
            _tiles(summary),
            "<h2>Summary</h2>",
            _table(("", "this run", "data-parallel baseline")[: 3 if summary["baseline"] else 2], _rows(summary)),
            *figures,
            "<h2>Islands</h2>",
            _table(ISLAND_COLUMNS, [_island_row(island) for island in run.islands]),
            _faults(read_faults(run.run_dir)),
            _aborts(run.islands),
            _footer(run.run_dir),
            "</body>\n</html>\n",
        ]
    )


def _subtitle(run: RunRecords, summary: Summary) -> str:
    islands = f"{summary['num_islands']} island" + ("" if summary["num_islands"] == 1 else "s")
    facts = run.facts
    if facts is None:
        return f"{islands}; no {FACTS}, so the model's size is not known"
    begun = f", begun {facts.created[:16].replace('T', ' ')} UTC" if facts.created else ""
    return f"{human_count(facts.num_params)} parameters on {islands}{begun}"


def _tiles(summary: Summary) -> str:
    ratio, traffic = summary["loss_ratio"], traffic_ratio(summary)
    against = f"{(ratio - 1) * 100:+.1f} % to data-parallel" if ratio else _against_bigram(summary)
    aborted, equal = summary["rounds_aborted"], summary["digests_equal"]
    verdict = {None: ("", UNKNOWN), True: ("good", "equal"), False: ("wrong", "DIFFERENT")}[equal]
    if summary["final_eval_losses"] is not None:
        verdict, against = ("", "their own"), f"mean of islands; {against}"
    sent, would_have = total(summary["bytes_sent"]), total(summary["data_parallel_bytes"])
    than = f"{human_bytes(sent)} instead of {human_bytes(would_have)}" if would_have else "by all islands together"
    which = ", ".join(map(str, summary["rounds_disagreeing"][:8]))
    tiles = [
        ("Held-out loss", human_loss(summary["final_eval_loss"]), against, ""),
        ("Bytes sent", f"{traffic:.1f}x less" if traffic else human_bytes(sent), than, ""),
        ("Rounds committed", str(summary["rounds_committed"]), f"attempts aborted: {aborted}", ""),
        ("Digests of all islands", verdict[1], f"rounds {which}" if which else "in every committed round", verdict[0]),
    ]
    return "<div class='tiles'>" + "".join(_tile(*tile) for tile in tiles) + "</div>"


def _tile(label: str, value: str, more: str, look: str) -> str:
    return (
        f"<div class='tile'><div class='label'>{html.escape(label)}</div>"
        f"<div class='value {look}'>{html.escape(value)}</div><div class='more'>{html.escape(more)}</div></div>"
    )


def _against_bigram(summary: Summary) -> str:
    bigram = summary["bigram_loss"]
    return "nats a token" if bigram is None else f"byte bigram model {bigram:.3f}"


def _rows(summary: Summary) -> list[Sequence[str]]:
    return [row if summary["baseline"] else row[:2] for row in summary_rows(summary)]


ISLAND_COLUMNS = ("island", "inner steps", "skipped", "tokens", "tokens/s", "committed", "sent", "received", "waited")


def _island_row(island: IslandRecords) -> Sequence[str]:
    train_seconds = sum(step.seconds for step in island.steps)
    tokens = max((step.tokens for step in island.steps), default=0)
    return (
        island.name,
        str(len(island.steps)),
        str(sum(step.skipped for step in island.steps)),
        human_count(tokens),
        human_count(
            sum(s.tokens_per_second * s.seconds for s in island.steps) / train_seconds if train_seconds else None
        ),
        str(sum(record.committed for record in island.rounds)),
        human_bytes(sum(record.bytes_sent for record in island.rounds)),
        human_bytes(sum(record.bytes_received for record in island.rounds)),
        human_seconds(sum(record.wait_seconds for record in island.rounds)),
    )


def _faults(faults: Sequence[FaultRecord]) -> str:
    """What was inflicted, and when: seconds after the first."""
    if not faults:
        return ""
    rows = [(human_seconds(fault.time - faults[0].time), fault.spec, fault.text) for fault in faults]
    table = _table(("after the first", "fault", "what happened"), rows[:MAX_FAULTS_LISTED], num_texts=2)
    more = f"<p class='sub'>and {len(rows) - MAX_FAULTS_LISTED} more</p>" if len(rows) > MAX_FAULTS_LISTED else ""
    return f"<h2>Faults</h2>{table}{more}"


def _aborts(islands: Sequence[IslandRecords]) -> str:
    aborts = [(island, record) for island in islands for record in island.rounds if not record.committed]
    events = [(island, event) for island in islands for event in island.events]
    parts = []
    if aborts:
        rows = [_abort_row(island, record) for island, record in aborts[:MAX_ABORTS_LISTED]]
        parts.append("<h2>Aborted attempts</h2>" + _table(("round", "attempt", "seen by", "cause"), rows, num_texts=2))
        if len(aborts) > MAX_ABORTS_LISTED:
            parts.append(f"<p class='sub'>and {len(aborts) - MAX_ABORTS_LISTED} more</p>")
    if events:
        rows = [(island.name, event.name, event.text) for island, event in events[-MAX_ABORTS_LISTED:]]
        parts.append("<h2>Events</h2>" + _table(("island", "event", ""), rows, num_texts=2))
    return "\n".join(parts)


def _abort_row(island: IslandRecords, record: RoundRecord) -> Sequence[str]:
    return (str(record.round), str(record.attempt), island.name, record.cause or UNKNOWN)


def _figure(title: str, caption: str, stem: str, note: str | None) -> str:
    if note is not None:
        return f"<figure><h2>{html.escape(title)}</h2><div class='note'>{html.escape(note)}</div></figure>"
    return (
        f"<figure><img src='{PLOT_FOLDER}/{stem}.png' alt='{html.escape(title)}'>"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int = 0) -> str:
    """The last `num_texts` columns are running text: left-aligned and wrapped."""
    first_text = len(head) - num_texts
    lines = ["<div class='scroll'><table><tr>" + "".join(_cell("th", c, i >= first_text) for i, c in enumerate(head))]
    lines += ["</tr><tr>" + "".join(_cell("td", c, i >= first_text) for i, c in enumerate(row)) for row in rows]
    return "\n".join([*lines, "</tr></table></div>"])


def _cell(tag: str, text: str, is_text: bool) -> str:
    # Island names and causes come from peers: nothing reaches the page unescaped.
    return f"<{tag}{' class=text' if is_text else ''}>{html.escape(text)}</{tag}>"


def _footer(run_dir: Path) -> str:
    files = ["config.yaml", SUMMARY, FACTS]
    links = [f"<a href='{name}'>{name}</a>" for name in files if (run_dir / name).is_file()]
    return f"<footer>{' &middot; '.join(links)}</footer>" if links else ""
