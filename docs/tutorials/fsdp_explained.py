# %% [markdown]
# # FSDP2, explained on our code
#
# Data-parallel ranks would all hold the same weights, gradients and moments. FSDP (ZeRO-3,
# 1910.02054) gives each rank a **shard** of them instead. A layer's weights are gathered just
# before they are needed and freed after it; its gradients are summed and cut into shards again in
# one step. First a layer by hand, then what this library does with a whole model, and what it
# costs.

# %%
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import diloco  # finds `inner`, in a checkout and in an installed wheel

from inner.config import ParallelConfig
from inner.dry_run.comm_counter import CommCounter, island_groups
from inner.measure.traffic.expected import expected_traffic
from inner.measure.workload import Workload
from inner.mesh import Degrees, IslandMesh
from inner.model.init import initialise
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer
from inner.parallel.build import Layout, build_cutter, build_runner, build_stages, build_whole
from inner.params import LocalParams

torch.set_num_threads(1)  # a fork hangs if its parent has computed on several threads
RANKS = 2


def on_ranks(function):
    """Run function(rank) in a process for each rank, which meet through a file, and return the
    results.
    """
    meeting = Path(tempfile.mkdtemp()) / "meeting"

    def rank_main(rank):
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS
        )
        torch.save(function(rank), f"{meeting}.{rank}")
        dist.destroy_process_group()

    mp.start_processes(rank_main, nprocs=RANKS, start_method="fork")
    return [torch.load(f"{meeting}.{rank}") for rank in range(RANKS)]


def difference(got, expected):
    """Length of the difference, relative to what is expected."""
    return ((got - expected).norm() / expected.norm()).item()


# %% [markdown]
# ## By hand: gather, compute, scatter the sum
#
# A rank holds some rows of a weight. The forward gathers all rows. The backward of a gather is a
# **reduce-scatter**: every rank has a gradient of the whole weight, from its own tokens; their sum
# is wanted, and each rank keeps its rows.


# %%
class Gather(torch.autograd.Function):
    """Rows of all ranks from the rows of each; the gradient of a rank's rows is summed over the
    ranks.
    """

    @staticmethod
    def forward(ctx, rows):
        whole = torch.empty(RANKS * rows.shape[0], *rows.shape[1:])
        dist.all_gather_single(whole, rows)
        return whole

    @staticmethod
    def backward(ctx, grad):
        rows = torch.empty(grad.shape[0] // RANKS, *grad.shape[1:])
        dist.reduce_scatter_single(rows, grad.contiguous())
        return rows


def by_hand(rank):
    generator = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(8, 16, generator=generator),
        torch.randn(RANKS, 4, 16, generator=generator),
    )
    rows = weight.chunk(RANKS)[rank].clone().requires_grad_()
    F.linear(x[rank], Gather.apply(rows)).square().sum().backward()
    whole = weight.clone().requires_grad_()
    F.linear(x, whole).square().sum().backward()  # all ranks' tokens, in one process
    return difference(rows.grad, whole.grad.chunk(RANKS)[rank])


errors = on_ranks(by_hand)
print("relative difference of the shards' gradients from those of one process:", errors)
assert max(errors) < 1e-6

# %% [markdown]
# ## A model of ours
#
# `apply_fsdp` in `inner/parallel/weights/fsdp.py` calls torch's `fully_shard` on every block, on
# the embedding, on the last norm with the head, and on the root. Each is a group whose weights are
# gathered together. The parameters become **DTensors**: a name, the shape of the whole, and on each
# rank its rows in fp32. For the time of a layer's computation FSDP puts plain bfloat16 tensors of
# the whole weights in their places. We watch it do so, with hooks on the blocks.

# %%
SIZES = ModelSizes(dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=160, vocab_size=256)
LENGTH, MICRO_BATCH, MICRO_BATCHES = 32, 2, 2
WINDOWS = torch.randint(
    0,
    256,
    (RANKS, MICRO_BATCHES, MICRO_BATCH, LENGTH + 1),
    generator=torch.Generator().manual_seed(1),
)


def build(parallel, compute_dtype):
    """This rank's model, what runs it, what cuts windows, and the mesh."""
    mesh = IslandMesh(Degrees(dp_shard=RANKS), "cpu")
    layout = Layout(SIZES, LENGTH, mesh, parallel, compute_dtype, torch.device("cpu"))
    stages = build_stages(layout)
    initialise(LocalParams(build_whole(layout), stages), stages, seed=0)
    return (
        stages[0],
        build_runner(layout, stages, MICRO_BATCH, MICRO_BATCHES),
        build_cutter(layout, None),
        mesh,
    )


def drawn(blocks):
    """For each block: # if its weights are gathered, . if only this rank's shard is there."""
    gathered = [getattr(block.ffn.up_proj.weight, "placements", None) is None for block in blocks]
    return "".join("#" if each else "." for each in gathered)


def what_happens(zero, rank):
    model, runner, cutter, _ = build(ParallelConfig(zero=zero), torch.bfloat16)
    blocks, seen, weight = list(model.blocks()), [], model.layers["0"].ffn.up_proj.weight
    at_rest = (
        f"{tuple(weight.shape)} {weight.placements} {tuple(weight.to_local().shape)} {weight.dtype}"
    )
    for number, block in enumerate(blocks):
        inside = block.ffn.up_proj
        block.ffn.register_forward_pre_hook(
            lambda *_, n=number, at=inside: seen.append(
                (f"forward {n}", drawn(blocks), str(at.weight.dtype))
            )
        )
        block.ffn.register_full_backward_pre_hook(
            lambda *_, n=number: seen.append((f"backward {n}", drawn(blocks), ""))
        )
    runner.backward([cutter(WINDOWS[rank, 0])] * MICRO_BATCHES, scale=torch.ones(()))
    grad = model.layers["0"].ffn.up_proj.weight.grad
    return (
        at_rest,
        seen[: 2 * len(blocks)],
        f"{grad.placements} {tuple(grad.to_local().shape)} {grad.dtype}",
    )


for zero in (3, 2):
    at_rest, moments, grad = on_ranks(partial(what_happens, zero))[0]
    print(f"\nZeRO-{zero}. up_proj of a block at rest: {at_rest}; its gradient: {grad}")
    for when, blocks, dtype in moments:
        print(f"  {when:10}  {blocks}  {dtype and 'computes in ' + dtype}")
    most = max(blocks.count("#") for _, blocks, _ in moments)
    print(f"  at most {most} of {len(blocks)} blocks are gathered")
    assert most == (1 if zero == 3 else SIZES.num_layers) and "torch.float32" in at_rest + grad
    assert all(dtype == "torch.bfloat16" for when, _, dtype in moments if "forward" in when)

# %% [markdown]
# With ZeRO-3 a block's weights are there while it computes, in forward and backward (on a GPU the
# next block's are already on their way). With ZeRO-2 they stay from the forward to the backward:
# more memory, and one gather fewer. The gradient is back in fp32 and in shards as soon as the
# block's backward is done, **summed** over ranks and not averaged: our loss is divided by the
# number of tokens of the whole step beforehand.
#
# ## What it costs
#
# `CommCounter` counts what a rank really sends; `expected_traffic` is the formula behind `diloco
# mesh`. The settings are `island.parallel.zero` and `island.parallel.accumulate`: whether every
# micro-batch reduces its gradients, or only the last one, for which whole gradients are kept in
# between.


# %%
def sent(parallel, rank):
    _, runner, cutter, mesh = build(parallel, torch.bfloat16)
    micro_batches = [cutter(windows) for windows in WINDOWS[rank]]
    with CommCounter(island_groups(mesh)) as counter:
        runner.backward(micro_batches, scale=torch.ones(()))
    work = Workload(
        sizes=SIZES,
        degrees=mesh.degrees,
        parallel=parallel,
        seq_len=LENGTH,
        micro_batch=MICRO_BATCH,
        num_micro_batches=MICRO_BATCHES,
        compute_itemsize=2,
    )
    return [(row.op, row.calls, row.sent_bytes) for row in counter.rows], [
        (row.op, row.calls, row.sent_bytes) for row in expected_traffic(work)
    ]


weights = {}
for zero, accumulate in ((3, "sharded"), (2, "sharded"), (3, "whole")):
    counted, planned = on_ranks(partial(sent, ParallelConfig(zero=zero, accumulate=accumulate)))[0]
    assert sorted(counted) == sorted(planned)
    told = ", ".join(f"{op} {calls} times, {size / 1000:.0f} kB" for op, calls, size in counted)
    print(f"ZeRO-{zero}, {accumulate:8} {told}")
    weights[zero, accumulate] = {op: size for op, _, size in counted}
assert weights[2, "sharded"]["all_gather"] < weights[3, "sharded"]["all_gather"]
assert (
    weights[3, "whole"]["reduce_scatter"] * MICRO_BATCHES == weights[3, "sharded"]["reduce_scatter"]
)

# %% [markdown]
# Counted and planned are equal to the byte, which is why `diloco mesh` can be believed before
# anything runs.
#
# Now change something: `MICRO_BATCHES = 8` and see which of the figures grow; `RANKS = 4` (a shard
# gets smaller, and a rank sends more); `torch.float32` instead of `torch.bfloat16`. What is in
# which dtype says [mixed precision](../precision.md); what all of it needs, [the memory of a
# step](../memory.md).
