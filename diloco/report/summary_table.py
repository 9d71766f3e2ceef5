"""A run's summary as rows of text and as a table on the console."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.formatting import UNKNOWN, human_bytes, human_count, human_loss, human_seconds
from diloco.report.summary import Summary, total, traffic_ratio

SummaryRow = tuple[str, str, str]
"""Name of the figure, its value in this run, and in the baseline (empty if the baseline has no such
figure).
"""


def summary_rows(summary: Summary) -> list[SummaryRow]:
    """Return one row for each known figure."""
    baseline = summary["baseline"]
    ours = _training_figures(summary)
    theirs = _training_figures(baseline) if baseline else {}
    (loss, *trained) = [(what, ours[what], theirs.get(what, "")) for what in ours]
    sections = (_round_rows, _traffic_rows, _data_rows, _fault_rows, _data_parallel_rows)
    alone = [row for section in sections for row in section(summary)]
    return [
        loss,
        *((what, figure, "") for what, figure in _reference_figures(summary)),
        *trained,
        *((what, figure, "") for what, figure in alone),
    ]


def print_summary(summary: Summary, console: Console) -> None:
    """Print the summary as a table."""
    table = Table(title=Text(f"Run {summary['name']}"), title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("this run", justify="right")
    if summary["baseline"]:
        table.add_column("data-parallel baseline", justify="right")
    for what, ours, theirs in summary_rows(summary):
        cells = [what, ours, theirs] if summary["baseline"] else [what, ours]
        table.add_row(*(Text(cell) for cell in cells))
    console.print(Text(summary["headline"]))
    console.print(Text(summary["since"]))
    console.print(table)


def describe_digests(summary: Summary) -> str:
    """Describe whether all islands held the same bits."""
    if summary["final_eval_losses"] is not None:
        return "gossip: each its own"
    is_equal = summary["digests_equal"]
    if is_equal and summary["islands_unread"]:
        return f"yes, of {summary['islands_read']} of {summary['num_islands']} islands"
    return UNKNOWN if is_equal is None else "yes" if is_equal else "NO"


def describe_unread(summary: Summary) -> str:
    """Return how to include islands whose records are elsewhere; empty if all have been read."""
    if not (unread := summary["islands_unread"]):
        return ""
    names = ", ".join(unread[:8]) + (", ..." if len(unread) > 8 else "")
    return (
        f"Not in this report: {names}. Their records are in the run's folder on their own "
        "machines; to include them, give these folders, too: diloco report RUN_DIR RUN_DIR ..."
    )


def _training_figures(figures: Summary) -> dict[str, str]:
    """Format the figures that a run and its baseline have in common. The loss comes first."""
    bits = figures["final_bits_per_byte"]
    return {
        "Held-out loss (nats per token)": human_loss(figures["final_eval_loss"]),
        "Bits per byte": UNKNOWN if bits is None else f"{bits:.4f}",
        "Tokens": human_count(figures["tokens"]),
        "Inner steps of all (skipped)": f"{total(figures['steps'])} "
        f"({total(figures['skipped_steps'])})",
        "Wall time": human_seconds(figures["seconds"]),
    }


def _reference_figures(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield reference values to compare the loss with."""
    if summary["final_eval_losses"] is not None:
        known = [loss for loss in summary["final_eval_losses"].values() if loss is not None]
        spread = f"{human_loss(min(known))} to {human_loss(max(known))}" if known else UNKNOWN
        yield f"  mean of {len(known)} islands' own models", spread
    if summary["bigram_loss"] is not None:
        yield "Byte bigram model's loss", human_loss(summary["bigram_loss"])
    if summary["baseline"]:
        ratio = summary["loss_ratio"]
        yield "Loss against baseline", f"{(ratio - 1) * 100:+.2f} %" if ratio else UNKNOWN


def _round_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "Rounds committed", str(summary["rounds_committed"])
    yield "Attempts aborted", str(summary["rounds_aborted"])
    yield "Digests equal in every round", describe_digests(summary)


def _traffic_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "Sent between islands", human_bytes(total(summary["bytes_sent"]))
    if (share := summary.get("expert_bytes_share")) is not None:
        yield "Of it experts, by formula", f"{100 * share:.1f} %"
    if summary["wire_bytes_sent"] is not None:
        yield "On the wire, headers and all", human_bytes(total(summary["wire_bytes_sent"]))
    for name, axes in summary["inner_traffic"].items():
        told = [
            f"{axis} {human_bytes(sent)} (planned {human_bytes(planned)})"
            for axis, (sent, planned) in axes.items()
        ]
        yield f"Rank 0 of {name} sent per inner step", ", ".join(told)
    if summary["links"] is not None:
        yield "Links", summary["links"]


def _data_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield figures about the inner steps and the text that they read."""
    if summary["committed_share"] is not None:
        yield "Inner steps in committed rounds", f"{summary['committed_share'] * 100:.1f} %"
    if losses := summary.get("final_source_losses"):
        yield (
            "Held-out loss by source",
            ", ".join(f"{name} {human_loss(loss)}" for name, loss in losses.items()),
        )
    if summary["noise_scale"] is not None:
        step = human_count(summary["step_tokens"])
        yield (
            "Gradient noise scale",
            f"{human_count(summary['noise_scale'])} tokens (a step of all islands: {step})",
        )
    if loads := summary.get("expert_loads"):
        yield (
            "Load of the fullest expert by layer",
            ", ".join(f"{layer}: {load:.2f}" for layer, load in loads.items()),
        )
    if summary.get("experts_dropped"):
        yield "Choices above the experts' capacity", f"{summary['experts_dropped']:,}"
    if summary["source_tokens"]:
        yield "Tokens by source", _format_shares(summary["source_tokens"])
    if summary["units_trained"] is not None:
        figures = (f"{summary[f'units_{what}']:,}" for what in ("trained", "repeated", "open"))
        yield "Units trained, repeated, unused", " / ".join(figures)


def _fault_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield the islands that were missing, and the faults that were inflicted."""
    if gone := summary["islands_gone"]:
        yield (
            "Islands that did not come back",
            ", ".join(f"{name} ({cause[:60]})" for name, cause in gone.items()),
        )
    if late := summary["islands_late"]:
        yield "Joined late", ", ".join(f"{name} at round {number}" for name, number in late.items())
    if missed := summary["rounds_left_out"]:
        yield (
            "Present, but left out of rounds",
            ", ".join(f"{name} {number}" for name, number in missed.items()),
        )
    if summary["faults"]:
        yield (
            "Faults inflicted",
            ", ".join(f"{kind} {number}" for kind, number in sorted(summary["faults"].items())),
        )


def _data_parallel_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    would_have = total(summary["data_parallel_bytes"])
    if would_have is not None:
        ratio = traffic_ratio(summary)
        yield (
            "Data-parallel (bf16) would send",
            human_bytes(would_have) + (f" ({ratio:.1f}x)" if ratio else ""),
        )


def _format_shares(tokens: dict[str, int]) -> str:
    """Format shares as `code 70.1 %, prose 29.9 %`."""
    whole = sum(tokens.values())
    return ", ".join(f"{name} {100 * number / whole:.1f} %" for name, number in tokens.items())
