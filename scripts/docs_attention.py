"""Attention in tiles, as docs/attention.md explains it: a small version that counts what it moves,
and its plots.
"""

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from diloco.formatting import human_bytes
from diloco.report.style import ISLAND_COLORS, REFERENCE
from inner.config import ParallelConfig
from inner.measure.activations import ActivationMemory
from inner.measure.workload import Workload
from inner.mesh import Degrees
from inner.model.sizes import PRESETS
from scripts.docs_figures import narrow_axes

BF16 = 2
ROWS = 128
COLUMNS = 128
"""Queries and keys of a tile, in the tables and plots; kernels choose their own."""
HEAD_DIM = 128
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass
class Traffic:
    """Elements that attention of one head has read from the GPU's memory and written to it."""

    read: int = 0
    written: int = 0


def attend_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, rows: int, columns: int, traffic: Traffic
) -> Tensor:
    """Causal attention of queries (S, E), keys and values (S, E) of one head, tile by tile."""
    scale = q.shape[1] ** -0.5
    results = []
    for top in range(0, len(q), rows):
        queries = q[top : top + rows]
        traffic.read += queries.numel()
        most = torch.full((len(queries), 1), -torch.inf, dtype=q.dtype)
        total = torch.zeros(len(queries), 1, dtype=q.dtype)
        result = torch.zeros(len(queries), v.shape[1], dtype=q.dtype)
        for left in range(0, top + len(queries), columns):
            keys = k[left : left + columns]
            values = v[left : left + columns]
            traffic.read += keys.numel() + values.numel()
            is_later = (
                torch.arange(left, left + len(keys))
                > torch.arange(top, top + len(queries))[:, None]
            )
            scores = (queries @ keys.T * scale).masked_fill(is_later, -torch.inf)
            new_most = torch.maximum(most, scores.amax(1, keepdim=True))
            weights = (scores - new_most).exp()
            shrink = (most - new_most).exp()
            total = total * shrink + weights.sum(1, keepdim=True)
            result = result * shrink + weights @ values
            most = new_most
        results.append(result / total)
        traffic.written += result.numel() + len(queries)
    return torch.cat(results)


def count_tiles(length: int, head_dim: int, rows: int, columns: int) -> Traffic:
    """What `attend_in_tiles` counts, by formula, where `rows` and `columns` divide the length."""
    pairs = sum(-(-(top + rows) // columns) for top in range(0, length, rows))
    return Traffic(
        read=length * head_dim + 2 * pairs * columns * head_dim, written=length * (head_dim + 1)
    )


def count_whole(length: int, head_dim: int) -> Traffic:
    """The same where each step writes a matrix of scores: product, softmax, product."""
    scores = length * length
    inputs = 3 * length * head_dim
    return Traffic(read=inputs + 2 * scores, written=2 * scores + length * head_dim)


def kept_bytes(length: int) -> int:
    """What a layer of 8b keeps of attention for the backward of one sequence, by the plan of
    `diloco mesh`.
    """
    work = Workload(
        sizes=PRESETS["8b"],
        degrees=Degrees(),
        parallel=ParallelConfig(),
        seq_len=length,
        micro_batch=1,
        num_micro_batches=1,
        compute_itemsize=BF16,
    )
    return ActivationMemory(work, "cuda").block("none") - ActivationMemory(work, "cuda").block(
        "attention"
    )


def score_bytes(length: int) -> int:
    """A matrix of scores for each head of a layer of 8b, in bf16, which attention in tiles never
    has.
    """
    return BF16 * PRESETS["8b"].num_heads * length * length


def table() -> str:
    """Bytes that attention of one head moves, and that a layer keeps, by length."""
    lines = [
        "| positions | moved, scores in memory | moved, in tiles | kept by a layer | its scores "
        "would be |",
        "|---:|---:|---:|---:|---:|",
    ]
    for length in LENGTHS[::2]:
        whole, tiles = moved_bytes(length)
        cells = [
            f"{length:,}",
            *map(human_bytes, (whole, tiles, kept_bytes(length), score_bytes(length))),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def moved_bytes(length: int) -> tuple[int, int]:
    """Bytes that the forward of one head moves: with scores in memory, and in tiles."""
    whole = count_whole(length, HEAD_DIM)
    tiles = count_tiles(length, HEAD_DIM, ROWS, COLUMNS)
    return BF16 * (whole.read + whole.written), BF16 * (tiles.read + tiles.written)


def draw_traffic() -> Figure:
    """Bytes that move and bytes that are kept, against the length."""
    figure, axes = narrow_axes(
        "Attention: bytes against length", "positions of a sequence", "bytes"
    )
    moved = [moved_bytes(length) for length in LENGTHS]
    lines = [
        (
            "moved by a head, scores in memory",
            [whole for whole, _ in moved],
            ISLAND_COLORS[1],
            "o-",
        ),
        ("moved by a head, in tiles of 128", [tiles for _, tiles in moved], ISLAND_COLORS[0], "o-"),
        (
            "scores of a layer of 8b, if kept",
            [score_bytes(length) for length in LENGTHS],
            REFERENCE,
            "s--",
        ),
        (
            "kept by a layer of 8b, as planned",
            [kept_bytes(length) for length in LENGTHS],
            ISLAND_COLORS[2],
            "s--",
        ),
    ]
    for label, values, color, style in lines:
        axes.plot(LENGTHS, values, style, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
    axes.set_ylim(1e6, 3e14)
    axes.legend(loc="upper left", fontsize=9)
    return figure


def draw_tiles() -> Figure:
    """The tiles of a causal matrix of scores, in the order in which they are visited."""
    figure, axes = narrow_axes("Tiles of the scores, in order", "keys", "queries", height=4.6)
    number = 0
    size = 6
    for row in range(size):
        for column in range(row + 1):
            number += 1
            color = ISLAND_COLORS[1] if row == column else ISLAND_COLORS[4]
            axes.add_patch(
                Rectangle((column, row), 1, 1, facecolor=color, edgecolor="white", alpha=0.75)
            )
            axes.text(column + 0.5, row + 0.5, str(number), ha="center", va="center", fontsize=13)
    axes.set_xlim(0, size)
    axes.set_ylim(size, 0)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("keys and values, a tile at a time", fontsize=11)
    axes.set_ylabel("queries, a tile at a time", fontsize=11)
    axes.text(size - 0.1, 0.5, "later keys:\nnever computed", ha="right", va="center", fontsize=11)
    return figure
