"""A run's summary for people: rows of text, and a table on the console."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.summary import Summary, total, traffic_ratio
from diloco.units import UNKNOWN, human_bytes, human_count, human_loss, human_seconds

Row = tuple[str, str, str]
"""What, this run, baseline; the baseline's column is blank where it has no such figure."""


def summary_rows(summary: Summary) -> list[Row]:
    """A row for each figure that is known."""
    baseline = summary["baseline"]
    ours, theirs = _trained(summary), _trained(baseline) if baseline else {}
    (loss, *trained) = [(what, ours[what], theirs.get(what, "")) for what in ours]
    alone = [*_rounds(summary), *_traffic(summary), *_text(summary), *_faults(summary), *_data_parallel(summary)]
    return [
        loss,
        *((what, figure, "") for what, figure in _compared(summary)),
        *trained,
        *((what, figure, "") for what, figure in alone),
    ]


def print_summary(summary: Summary, console: Console) -> None:
    """Show the summary as a table."""
    table = Table(title=Text(f"Run {summary['name']}"), title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("this run", justify="right")
    if summary["baseline"]:
        table.add_column("data-parallel baseline", justify="right")
    for what, ours, theirs in summary_rows(summary):
        cells = [what, ours, theirs] if summary["baseline"] else [what, ours]
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)


def digests_verdict(summary: Summary) -> str:
    """Whether all islands held the same bits, in a few words."""
    if summary["final_eval_losses"] is not None:
        return "gossip: each its own"
    is_equal = summary["digests_equal"]
    return UNKNOWN if is_equal is None else "yes" if is_equal else "NO"


def _trained(figures: Summary) -> dict[str, str]:
    """What a run and its baseline have in common; the loss comes first."""
    bits = figures["final_bits_per_byte"]
    return {
        "Held-out loss (nats a token)": human_loss(figures["final_eval_loss"]),
        "Bits per byte": UNKNOWN if bits is None else f"{bits:.4f}",
        "Tokens": human_count(figures["tokens"]),
        "Inner steps (skipped)": f"{total(figures['steps'])} ({total(figures['skipped_steps'])})",
        "Wall time": human_seconds(figures["seconds"]),
    }


def _compared(summary: Summary) -> Iterator[tuple[str, str]]:
    """What the loss is to be seen beside."""
    if summary["final_eval_losses"] is not None:
        known = [loss for loss in summary["final_eval_losses"].values() if loss is not None]
        spread = f"{human_loss(min(known))} to {human_loss(max(known))}" if known else UNKNOWN
        yield f"  mean of {len(known)} islands' own models", spread
    if summary["bigram_loss"] is not None:
        yield "Byte bigram model's loss", human_loss(summary["bigram_loss"])
    if summary["baseline"]:
        ratio = summary["loss_ratio"]
        yield "Loss against baseline", f"{(ratio - 1) * 100:+.2f} %" if ratio else UNKNOWN


def _rounds(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "Rounds committed", str(summary["rounds_committed"])
    yield "Attempts aborted", str(summary["rounds_aborted"])
    yield "Digests equal in every round", digests_verdict(summary)


def _traffic(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "Sent between islands", human_bytes(total(summary["bytes_sent"]))
    if summary["wire_bytes_sent"] is not None:
        yield "On the wire, headers and all", human_bytes(total(summary["wire_bytes_sent"]))
    if summary["links"] is not None:
        yield "Links", summary["links"]


def _text(summary: Summary) -> Iterator[tuple[str, str]]:
    """What became of the steps and of the text they read."""
    if summary["committed_share"] is not None:
        yield "Inner steps in committed rounds", f"{summary['committed_share'] * 100:.1f} %"
    if summary["source_tokens"]:
        yield "Tokens by source", _shares(summary["source_tokens"])
    if summary["units_trained"] is not None:
        figures = (f"{summary[f'units_{what}']:,}" for what in ("trained", "repeated", "open"))
        yield "Units trained, repeated, open", " / ".join(figures)


def _faults(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary["faults"]:
        yield "Faults inflicted", ", ".join(f"{kind} {number}" for kind, number in sorted(summary["faults"].items()))


def _data_parallel(summary: Summary) -> Iterator[tuple[str, str]]:
    would_have = total(summary["data_parallel_bytes"])
    if would_have is not None:
        ratio = traffic_ratio(summary)
        yield "Data-parallel would have sent", human_bytes(would_have) + (f" ({ratio:.1f}x)" if ratio else "")


def _shares(tokens: dict[str, int]) -> str:
    """`code 70.1 %, prose 29.9 %`."""
    whole = sum(tokens.values())
    return ", ".join(f"{name} {100 * number / whole:.1f} %" for name, number in tokens.items())
