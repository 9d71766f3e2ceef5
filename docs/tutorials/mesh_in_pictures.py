# %% [markdown]
# # The mesh in pictures
#
# Sixteen ranks, four axes of two: `pp` cuts the layers, `dp_shard` the text and the weights, `cp`
# the sequence, `tp` every matrix. This page draws which ranks talk to each other along each axis,
# which piece of a weight each rank holds, and how the pipeline passes the time. Nothing is started:
# the pictures come from the functions that the trainer and `diloco mesh` use.

# %%
import multiprocessing
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
from matplotlib.patches import Rectangle
from torch.testing._internal.distributed.fake_pg import FakeStore

import diloco  # finds `inner`, in a checkout and in an installed wheel

from diloco.planning.mesh.ranks import rank_groups
from inner.config import ParallelConfig
from inner.dry_run.placements import find_placements
from inner.mesh import Degrees, IslandMesh
from inner.model.sizes import ModelSizes
from inner.parallel.build import Layout, build_stages, build_whole
from inner.parallel.context.build import rank_positions
from inner.parallel.pipeline.schedule import rank_actions, simulate
from inner.params import LocalParams

DEGREES = Degrees(pp=2, dp_shard=2, cp=2, tp=2)
SIZES = ModelSizes(dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=256)
LENGTH, MICRO_BATCHES = 128, 4
COLOURS = plt.get_cmap("tab20").colors

# %% [markdown]
# ## Who talks to whom
#
# A group of an axis are the ranks that differ on that axis alone. Ranks are numbered so that `tp`,
# which talks most, has neighbours: put eight ranks on a node and `tp`, `cp` and `dp_shard` stay
# inside it, only `pp` leaves it.
#
# ![Sixteen ranks, coloured by the group they are in on each of the four
# axes](../images/mesh_groups.png)

# %%
AXES = [axis for axis in ("pp", "dp_shard", "cp", "tp") if getattr(DEGREES, axis) > 1]


def place_of(rank):
    """Column and row of a rank in the drawing: tp and cp across, dp_shard and pp down."""
    at = DEGREES.coordinates(rank)
    return at["cp"] * (DEGREES.tp + 0.3) + at["tp"], at["pp"] * (DEGREES.dp_shard + 0.3) + at[
        "dp_shard"
    ]


figure, panels = plt.subplots(1, len(AXES), figsize=(3 * len(AXES), 3.3), layout="constrained")
for panel, axis in zip(panels, AXES, strict=True):
    groups = rank_groups(DEGREES, axis)
    for number, group in enumerate(groups):
        places = np.array([place_of(rank) for rank in group]) + 0.5
        for here, there in pairwise(places):
            bow = {
                "arrowstyle": "-",
                "connectionstyle": "arc3,rad=0.3",
                "lw": 5,
                "color": COLOURS[number % 20],
            }
            panel.annotate("", here, there, arrowprops=bow)
        for rank, (x, y) in zip(group, places, strict=True):
            panel.scatter(x, y, s=420, color=COLOURS[number % 20], zorder=2)
            panel.text(x, y, rank, ha="center", va="center", zorder=3)
    panel.set(
        title=f"{axis}: {len(groups)} groups of {len(groups[0])}",
        aspect="equal",
        xticks=[],
        yticks=[],
    )
    panel.margins(0.15)
    panel.invert_yaxis()
figure.savefig("mesh_groups.png", dpi=90)
for axis in AXES:
    assert sorted(rank for group in rank_groups(DEGREES, axis) for rank in group) == list(
        range(DEGREES.num_ranks)
    )
assert [len(rank_groups(DEGREES, axis)) for axis in AXES] == [DEGREES.num_ranks // 2] * len(AXES)

# %% [markdown]
# ## Who holds what of a weight
#
# `LocalParams` says which rectangle of a parameter a rank holds. We ask it on every rank of the
# first stage: a process says that it is this rank, and builds the model without memory and without
# the others. Tensor parallelism cuts `q_proj` by rows (by heads) and `out_proj` by columns; FSDP
# cuts what is left by rows, over `dp_shard` and `cp` together, because ranks of `cp` have the same
# weights, too.
#
# ![Two weights of the first layer, cut into the rectangles of eight ranks; and the positions of a
# sequence by rank of cp](../images/mesh_weights.png)


# %%
def rectangles(rank):
    """Rows and columns of each parameter that a rank holds, by name."""
    dist.init_process_group("fake", rank=rank, world_size=DEGREES.num_ranks, store=FakeStore())
    mesh = IslandMesh(DEGREES, "cpu")
    layout = Layout(SIZES, LENGTH, mesh, ParallelConfig(), torch.float32, torch.device("meta"))
    held = LocalParams(build_whole(layout), build_stages(layout)).slices
    return {each.name: (each.rows, each.cols) for each in held}


SHOWN = ("layers.0.attention.q_proj.weight", "layers.0.attention.out_proj.weight")
first_stage = [rank for rank in range(DEGREES.num_ranks) if DEGREES.coordinates(rank)["pp"] == 0]
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    held = dict(zip(first_stage, pool.map(rectangles, first_stage, chunksize=1), strict=True))

figure, panels = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
for panel, name in zip(panels, SHOWN, strict=False):
    covered = np.zeros((SIZES.dim, SIZES.dim), dtype=int)
    for rank in first_stage:
        (top, bottom), (left, right) = held[rank][name]
        covered[top:bottom, left:right] += 1
        size = right - left, bottom - top
        panel.add_patch(
            Rectangle((left, top), *size, facecolor=COLOURS[2 * rank % 20], edgecolor="white", lw=2)
        )
        panel.text(left + size[0] / 2, top + size[1] / 2, f"rank {rank}", ha="center", va="center")
    panel.set(
        title=name.removesuffix(".weight"), xlim=(0, SIZES.dim), ylim=(SIZES.dim, 0), aspect="equal"
    )
    panel.set(xlabel="columns: inputs", ylabel="rows: outputs")
    assert (covered == 1).all()  # every element is on one rank of the stage
for cp_rank in range(DEGREES.cp):
    positions = rank_positions("ring", LENGTH, DEGREES.cp, cp_rank)
    panels[2].bar(positions, 0.8, width=1, bottom=cp_rank - 0.4, color=COLOURS[4 * cp_rank])
panels[2].set(
    title="positions of a sequence (zigzag)", yticks=range(DEGREES.cp), ylim=(-1, DEGREES.cp)
)
panels[2].set_yticklabels([f"cp {cp_rank}" for cp_rank in range(DEGREES.cp)])
figure.savefig("mesh_weights.png", dpi=90)

# %% [markdown]
# `diloco mesh CONFIG --placements` prints this for every parameter. Here is what it knows of the
# two:

# %%
placed = {each.name: each for each in find_placements(SIZES, DEGREES, ParallelConfig(), LENGTH)}
for name in SHOWN:
    print(
        f"{name:36} {dict(placed[name].cuts)}, {placed[name].local_shape} of {placed[name].shape}"
    )
    (top, bottom), (left, right) = held[0][name]
    assert placed[name].local_shape == (bottom - top, right - left)

# %% [markdown]
# ## How the pipeline passes the time
#
# Two ranks, each with a part of the layers, and four micro-batches. White is waiting. With two
# stages for each rank, and backwards that are split into what others wait for and what can be done
# later, almost nothing is left of it.
#
# ![Time lines of three schedules on two ranks](../images/mesh_pipeline.png)

# %%
KINDS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "input_backward": "#f58518",
    "weight_backward": "#e3c08d",
}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zbv": 2}
figure, panels = plt.subplots(len(SCHEDULES), 1, figsize=(10, 4.6), layout="constrained")
bubbles = {}
for panel, (schedule, per_rank) in zip(panels, SCHEDULES.items(), strict=True):
    orders = rank_actions(schedule, DEGREES.pp, per_rank * DEGREES.pp, MICRO_BATCHES)
    run = simulate(orders, forward=1 / per_rank, backward=2 / per_rank)
    bubbles[schedule] = run.bubble
    for rank, start, stop, action in run.timeline:
        bar = Rectangle(
            (start, rank), stop - start, 0.9, facecolor=KINDS[action.kind], edgecolor="white"
        )
        panel.add_patch(bar)
        panel.text(
            (start + stop) / 2,
            rank + 0.45,
            action.micro_batch,
            ha="center",
            va="center",
            fontsize=8,
        )
    panel.set(xlim=(0, 16), ylim=(DEGREES.pp, 0), yticks=[0.45, 1.45], yticklabels=["pp 0", "pp 1"])
    alive = " and ".join(f"{live / per_rank:.0f}" for live in run.peak_live)
    panel.set_title(
        f"{schedule}: waits {100 * run.bubble:.0f} % of the work's time; keeps {alive} "
        "micro-batches at most"
    )
figure.savefig("mesh_pipeline.png", dpi=90)
print(bubbles)
assert bubbles["gpipe"] == bubbles["1f1b"] > bubbles["zbv"]

# %% [markdown]
# Now change `DEGREES`, for example `Degrees(dp_replicate=2, dp_shard=4, tp=2)` with `AXES` of your
# own, or `MICRO_BATCHES = 8`. Of your own config `diloco mesh` draws the same as text, with the
# bytes on each axis and the memory of a rank: [choosing a mesh](../mesh.md). `diloco simulate
# configs/four-dimensions.yaml --islands 1` trains on this mesh.
