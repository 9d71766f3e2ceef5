"""Tables and plots of docs/roofline.md: the roofline of our step, beside what was measured on an
H100.
"""

import re
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from diloco.planning.mesh.gpus import find_gpu
from diloco.planning.mesh.picture import show_mesh
from diloco.planning.mesh.request import MeshRequest
from diloco.planning.mesh.roofline import model_flops, roofline_mfu, step_work
from diloco.report.style import ISLAND_COLORS, REFERENCE
from inner.config import ParallelConfig
from inner.measure.workload import Workload
from inner.mesh import Degrees
from inner.model.sizes import PRESETS, ModelSizes
from inner.optim.state_bytes import STATE_BYTES
from scripts.docs_figures import narrow_axes
from scripts.results_plots import PAGE, read_table

ROOT = Path(__file__).resolve().parent.parent
GPU = find_gpu("h100")
ADAMW = STATE_BYTES["adamw"]
COPY_RATE = 2.94e12
PRODUCT_RATE = 768e12
"""What one H100 did at most, by docs/log.md: bytes per second of a copy, and operations of a
product of 8192 cubed.
"""
MICRO_BATCH_TOKENS = {"150m": 16384, "1b": 8192, "six": 8192}
"""Tokens of a micro-batch where they were measured: scripts/gpu_report/speed.py."""


@dataclass(frozen=True)
class Shape:
    """A model and a step whose speed docs/results.md has."""

    label: str
    work: Workload
    mfu: float
    """Measured on an H100, compiled, without recomputation."""


def measured_shapes() -> list[Shape]:
    """The shapes of the table of docs/results.md, each once."""
    shapes = []
    label = ""
    for row in read_table(PAGE.read_text(), "On one GPU"):
        found = re.search(r"\((\d+\.\d) %\)", row[1])
        if found is None or row[0].startswith("the same"):
            continue
        label = row[0]
        shapes.append(Shape(label, workload_of(label), float(found[1]) / 100))
    return shapes


def workload_of(label: str) -> Workload:
    """The step that a label of the table describes."""
    seq_len = int(re.findall(r"\b(4096|8192)\b", label)[0])
    tokens = int(re.findall(r"(\d+)k(?: tokens per step)?$", label)[0]) * 1024
    name = label.split(",")[0].split(" ")[0]
    return Workload(
        sizes=sizes_of(name),
        degrees=Degrees(),
        parallel=ParallelConfig(),
        seq_len=seq_len,
        micro_batch=MICRO_BATCH_TOKENS[name] // seq_len,
        num_micro_batches=tokens // MICRO_BATCH_TOKENS[name],
        compute_itemsize=2,
    )


def sizes_of(name: str) -> ModelSizes:
    """The model of a shape."""
    if name == "150m":
        return replace(PRESETS["150m"], vocab_size=32000)
    if name == "1b":
        return PRESETS["1b"]
    return replace(PRESETS["8b"], num_layers=6)


def command_output() -> str:
    """The roofline that `diloco mesh --gpu` prints for the command of the page, as a block."""
    words = [
        "model.preset=8b",
        "model.vocab_size=128256",
        "islands=[{ranks: 8}]",
        "outer.start_islands=1",
        "data.seq_len=8192",
        "optimizer.tokens_per_step=65536",
        "island.micro_batch=1",
        "island.parallel.recompute=full",
    ]
    out = StringIO()
    show_mesh(
        ROOT / "configs/quickstart.yaml",
        words,
        MeshRequest(gpu="h100"),
        Console(file=out, width=100),
    )
    section = "Roofline" + out.getvalue().split("\nRoofline")[1].split("\n\n")[0]
    return "\n".join(f"    {line.rstrip()}" for line in section.splitlines())


def seconds_of(shape: Shape) -> dict[str, float]:
    """Seconds of a measured step by kind of work at its best, and what the step took beyond."""
    seconds = {kind.name: kind.seconds(GPU) for kind in step_work(shape.work, ADAMW)}
    took = model_flops(shape.work) / (shape.mfu * GPU.flops)
    return seconds | {"beyond the bounds": took - sum(seconds.values())}


def table() -> str:
    """Each measured shape with its share of time by kind of work, its best and its measured MFU."""
    shapes = measured_shapes()
    names = list(seconds_of(shapes[0]))
    lines = [
        f"| share of the measured step | {' | '.join(short(shape.label) for shape in shapes)} |"
    ]
    lines.append("|---|" + "---:|" * len(shapes))
    parts = [seconds_of(shape) for shape in shapes]
    for name in names:
        cells = [f"{part[name] / sum(part.values()):.1%}" for part in parts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(
        f"| MFU at best | {' | '.join(f'{roofline_mfu(s.work, ADAMW, GPU):.0%}' for s in shapes)} |"
    )
    lines.append(f"| MFU measured | {' | '.join(f'{shape.mfu:.1%}' for shape in shapes)} |")
    return "\n".join(lines)


def short(label: str) -> str:
    """A label of a few letters."""
    name = "8b, six layers" if label.startswith("six") else label.split(",")[0]
    return f"{name}, {re.findall(r'4096|8192', label)[0]}"


def draw_roof() -> Figure:
    """The roof of an H100, by its data sheet and as measured, and where the work of a step of 8b's
    layers lies.
    """
    figure, axes = narrow_axes(
        "The roof of an H100", "operations per byte of memory traffic", "TFLOP/s", height=4.2
    )
    ridge = GPU.flops / GPU.memory_rate
    intensities = sorted([2.0**power for power in range(14)] + [ridge, PRODUCT_RATE / COPY_RATE])
    roofs = [
        ("data sheet", GPU.flops, GPU.memory_rate, "-"),
        ("measured: product and copy", PRODUCT_RATE, COPY_RATE, "--"),
    ]
    for label, flops, rate, style in roofs:
        axes.plot(
            intensities,
            [min(flops, rate * each) / 1e12 for each in intensities],
            style,
            color=REFERENCE,
            label=label,
        )
    shape = measured_shapes()[-1]
    kinds = [kind for kind in step_work(shape.work, ADAMW) if kind.flops]
    for kind, color in zip(kinds, ISLAND_COLORS, strict=False):
        intensity = kind.flops / kind.num_bytes
        axes.plot(
            intensity,
            min(GPU.flops, GPU.memory_rate * intensity) / 1e12,
            "o",
            ms=14,
            color=color,
            label=kind.name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1, 4, 16, 64, 256, 1024, 4096], ["1", "4", "16", "64", "256", "1024", "4096"])
    axes.legend(loc="lower right", fontsize=9)
    return figure


def draw_time() -> Figure:
    """What the measured seconds of a step went to, as shares."""
    figure, axes = narrow_axes("A step on an H100", "share of the measured step", "", height=4.0)
    shapes = measured_shapes()
    colors = [*ISLAND_COLORS[:5], "#C9CDD4"]
    parts = [seconds_of(shape) for shape in shapes]
    lefts = [0.0] * len(shapes)
    for name, color in zip(parts[0], colors, strict=True):
        shares = [part[name] / sum(part.values()) for part in parts]
        axes.barh(
            range(len(shapes)), shares, left=lefts, color=color, label=name, edgecolor="white"
        )
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_yticks(range(len(shapes)), [short(shape.label) for shape in shapes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, fontsize=9)
    return figure
