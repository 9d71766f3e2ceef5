"""Tables and plots of docs/long-context.md: what a long sequence costs, from the planner of `diloco
mesh`.
"""

from matplotlib.figure import Figure

from diloco.formatting import human_bytes
from diloco.report.style import ISLAND_COLORS, REFERENCE
from inner.config import ParallelConfig, Recompute
from inner.flops import flops_per_token
from inner.measure.memory import estimate_memory
from inner.measure.traffic.expected import expected_traffic
from inner.measure.workload import Workload
from inner.mesh import Degrees
from inner.model.sizes import PRESETS
from scripts.docs_figures import narrow_axes

SIZES = PRESETS["8b"]
RANKS = 16
LENGTHS = (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
DEGREES = (1, 2, 4, 8, 16)
CARD = 80e9
"""Bytes of an H100's memory."""


def workload(length: int, cp: int, recompute: Recompute = "full") -> Workload:
    """A step of 8b on 16 GPUs: one sequence for each data rank."""
    return Workload(
        sizes=SIZES,
        degrees=Degrees(dp_shard=RANKS // cp, cp=cp),
        parallel=ParallelConfig(recompute=recompute),
        seq_len=length,
        micro_batch=1,
        num_micro_batches=1,
        compute_itemsize=2,
    )


def peak(length: int, cp: int, recompute: Recompute = "full") -> int:
    """Bytes that a rank needs at most."""
    return estimate_memory(workload(length, cp, recompute), "adamw")[0].peak


def sent(length: int, cp: int) -> int:
    """Bytes of keys, values and their gradients that a rank sends in a step."""
    return sum(
        row.sent_bytes for row in expected_traffic(workload(length, cp), 0) if row.axis == "cp"
    )


def attention_share(length: int) -> float:
    """Attention's share of a token's operations, as MFU counts them."""
    flops = flops_per_token(SIZES, length)
    return flops.attention / flops.total


def memory_table() -> str:
    """The peak of a rank by length and degree of cp, with what does not fit in a card in
    brackets.
    """
    heads = " | ".join(f"cp {cp}" for cp in DEGREES)
    lines = [f"| positions | attention's share | {heads} |", "|---:|---:|" + "---:|" * len(DEGREES)]
    for length in LENGTHS:
        cells = [shown(peak(length, cp)) for cp in DEGREES]
        lines.append(f"| {length:,} | {attention_share(length):.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(num_bytes: int) -> str:
    """Bytes; in brackets if a card does not have them."""
    text = human_bytes(num_bytes)
    return f"({text})" if num_bytes > CARD else text


def traffic_table() -> str:
    """What a rank sends for attention, beside the operations that it makes meanwhile, at 131,072
    positions.
    """
    length = 131072
    lines = [
        "| cp | positions of a rank | sent in a step | PFLOP of a rank in a step | PFLOP for a GB |"
    ]
    lines.append("|---:|---:|---:|---:|---:|")
    for cp in DEGREES:
        num_bytes = sent(length, cp)
        flops = flops_per_token(SIZES, length).total * length / cp
        ratio = f"{flops / 1e15 / (num_bytes / 1e9):.2f}" if num_bytes else "-"
        cells = [
            str(cp),
            f"{length // cp:,}",
            human_bytes(num_bytes) if num_bytes else "-",
            f"{flops / 1e15:.2f}",
            ratio,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_memory() -> Figure:
    """The peak of a rank against the length, for each degree of cp, and the memory of a card."""
    figure, axes = narrow_axes(
        "8b on 16 GPUs: the fullest rank", "positions of a sequence", "GB", height=4.2
    )
    for cp, color in zip(DEGREES, ISLAND_COLORS, strict=False):
        axes.plot(
            LENGTHS,
            [peak(length, cp) / 1e9 for length in LENGTHS],
            "o-",
            color=color,
            label=f"cp {cp}",
        )
    axes.axhline(CARD / 1e9, color=REFERENCE, ls="--", label="an H100 has 80 GB")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    name_lengths(axes)
    axes.set_yticks([10, 20, 50, 100, 200, 500], ["10", "20", "50", "100", "200", "500"])
    axes.legend(loc="upper left", fontsize=9)
    return figure


def draw_flops() -> Figure:
    """Operations for a token against the length: those that do not depend on it, and attention."""
    figure, axes = narrow_axes(
        "8b: operations for a token", "positions of a sequence", "GFLOP", height=3.6
    )
    flops = [flops_per_token(SIZES, length) for length in LENGTHS]
    axes.plot(
        LENGTHS,
        [each.matmul / 1e9 for each in flops],
        "o-",
        color=ISLAND_COLORS[0],
        label="matrices",
    )
    axes.plot(
        LENGTHS,
        [each.attention / 1e9 for each in flops],
        "o-",
        color=ISLAND_COLORS[1],
        label="attention",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    name_lengths(axes)
    axes.legend(loc="upper left", fontsize=9)
    return figure


def name_lengths(axes) -> None:
    """Ticks at the lengths."""
    axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
    axes.minorticks_off()
