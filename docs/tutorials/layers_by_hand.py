# %% [markdown]
# # A tensor-parallel and a pipeline-parallel layer by hand
#
# Two ways to spread a model over processes, each in twenty lines, and then compared with those of
# this library: the same loss and the same gradients. **Tensor parallelism** cuts every matrix, so
# that all ranks work on one layer. **Pipeline parallelism** gives whole layers to ranks, so that
# they work on different micro-batches.

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
from inner.mesh import Degrees, IslandMesh
from inner.model.init import initialise
from inner.model.sizes import ModelSizes
from inner.model.stage import Stage
from inner.model.transformer import Transformer
from inner.parallel.build import Layout, build_cutter, build_runner, build_stages, build_whole
from inner.parallel.pipeline.schedule import draw, rank_actions, simulate
from inner.params import LocalParams, local_tensor

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
# ## Tensor parallelism: two matrices, one sum
#
# A feed-forward layer is `down(silu(gate(x)) * up(x))`. Give each rank half of the hidden units:
# half the **rows** of gate and up, and the matching **columns** of down. Each then computes its
# hidden units from start to end without asking anybody, and the layer's result is the sum of what
# the ranks have. One sum in the forward; in the backward the gradient of x is a sum, too, because
# each rank's units contribute to it. These two are all of Megatron's trick (1909.08053).

# %%
SIZES = ModelSizes(dim=64, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=128, vocab_size=256)
LENGTH, BATCH = 32, 2


class SumInForward(torch.autograd.Function):
    """Adds up what the ranks have; every rank gets the sum, and its gradient as it is."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumInBackward(torch.autograd.Function):
    """Passes x on; its gradient is the sum of those of the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


def whole_model():
    """The model of one process, with weights that depend on the seed and each parameter's name
    alone.
    """
    model = Transformer(SIZES, torch.arange(LENGTH))
    initialise(LocalParams(model, [model]), [model], seed=0)
    return model


def half(matrix, rank, dim):
    return matrix.detach().chunk(RANKS, dim)[rank].clone().requires_grad_()


def feed_forward_by_hand(rank):
    layer = whole_model().layers["0"].ffn
    gate, up = (half(each.weight, rank, dim=0) for each in (layer.gate_proj, layer.up_proj))
    down = half(layer.down_proj.weight, rank, dim=1)
    x = torch.randn(
        BATCH, LENGTH, SIZES.dim, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    here = SumInBackward.apply(x)
    y = SumInForward.apply(F.linear(F.silu(F.linear(here, gate)) * F.linear(here, up), down))
    y.square().sum().backward()
    whole_x = x.detach().clone().requires_grad_()
    layer(whole_x).square().sum().backward()
    return {
        "input": difference(x.grad, whole_x.grad),
        "gate": difference(gate.grad, layer.gate_proj.weight.grad.chunk(RANKS)[rank]),
        "down": difference(down.grad, layer.down_proj.weight.grad.chunk(RANKS, 1)[rank]),
    }


for rank, errors in enumerate(on_ranks(feed_forward_by_hand)):
    print(f"rank {rank}, relative difference of gradients from those of the whole layer:", errors)
    assert max(errors.values()) < 1e-5

# %% [markdown]
# Why rows first and columns second? Cut the other way round, each rank would hold half of every
# input of `silu`, which is not linear: the ranks would have to sum before it as well. Attention is
# cut in the same way, by heads.
#
# Ours is `inner/parallel/tensor.py`, a table of rows and columns for torch's `parallelize_module`.
# It also cuts the stream between the matrices along the sequence
# (`island.parallel.sequence_parallel`), which makes of each sum a scatter and a gather of the same
# bytes. The model itself does not change; its parameters become DTensors:

# %%
MICRO_BATCHES = 4
WINDOWS = torch.randint(
    0, 256, (MICRO_BATCHES, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(2)
)


def our_step(degrees, parallel):
    """Loss of a step of the model on this mesh, and this rank's parameters with their gradients."""
    layout = Layout(
        SIZES, LENGTH, IslandMesh(degrees, "cpu"), parallel, torch.float32, torch.device("cpu")
    )
    stages = build_stages(layout)
    initialise(LocalParams(build_whole(layout), stages), stages, seed=0)
    runner, cutter = (
        build_runner(layout, stages, BATCH, MICRO_BATCHES),
        build_cutter(layout, eos_id=None),
    )
    loss = runner.backward([cutter(windows) for windows in WINDOWS], scale=torch.ones(()))
    return loss.item(), {
        name: param for stage in stages for name, param in stage.named_parameters()
    }


def whole_step():
    model = whole_model()
    losses = [model(windows[:, :-1], targets_BS=windows[:, 1:]) for windows in WINDOWS]
    sum(losses).backward()
    return sum(losses).item(), {name: param.grad for name, param in model.named_parameters()}


def our_tensor_parallel_step(rank):
    loss, params = our_step(Degrees(tp=RANKS), ParallelConfig())
    expected_loss, expected = whole_step()
    name = "layers.0.ffn.down_proj.weight"
    mine = local_tensor(params[name].grad)
    error = difference(mine, expected[name].chunk(RANKS, 1)[rank])
    return {
        "loss": loss,
        "whole": expected_loss,
        "error": error,
        name: str(params[name].placements),
        "shape": mine.shape,
    }


for rank, told in enumerate(on_ranks(our_tensor_parallel_step)):
    print(f"rank {rank}:", told)
    assert abs(told["loss"] / told["whole"] - 1) < 1e-5 and told["error"] < 1e-5

# %% [markdown]
# `diloco mesh CONFIG --placements` shows such a table for every parameter of a model on any mesh.
#
# ## Pipeline parallelism: an order, and messages
#
# A rank has some of the layers. It receives a micro-batch from the rank before, computes, and sends
# the result on; the gradients come back the same way. All that is left to decide is the **order**
# of forwards and backwards. Our function `rank_actions` gives the order of each schedule; the loop
# below carries it out.

# %%
LAYERS = (range(2), range(2, 4))


def pipeline_by_hand(schedule, rank):
    is_first, is_last = rank == 0, rank == RANKS - 1
    stage = Transformer(SIZES, torch.arange(LENGTH), Stage(rank, LAYERS[rank], is_first, is_last))
    initialise(LocalParams(whole_model(), [stage]), [stage], seed=0)
    inputs, outputs, sends, most_alive, loss = {}, {}, [], 0, 0.0
    for kind, _, number in rank_actions(schedule, RANKS, RANKS, MICRO_BATCHES)[rank]:
        if kind == "forward":
            if is_first:
                inputs[number] = WINDOWS[number, :, :-1]
            else:
                inputs[number] = torch.empty(BATCH, LENGTH, SIZES.dim)
                dist.recv(inputs[number], rank - 1, tag=number)
                inputs[number].requires_grad_()
            outputs[number] = stage(inputs[number], targets_BS=WINDOWS[number, :, 1:])
            most_alive = max(most_alive, len(outputs))
            if not is_last:
                sends.append(dist.isend(outputs[number].detach(), rank + 1, tag=number))
        else:
            grad = None
            if not is_last:
                grad = torch.empty_like(outputs[number])
                dist.recv(grad, rank + 1, tag=MICRO_BATCHES + number)
            loss += outputs[number].item() if is_last else 0.0
            outputs.pop(number).backward(grad)
            if not is_first:
                sends.append(
                    dist.isend(inputs.pop(number).grad, rank - 1, tag=MICRO_BATCHES + number)
                )
    for send in sends:
        send.wait()
    return loss, most_alive, {name: param.grad for name, param in stage.named_parameters()}


expected_loss, expected = whole_step()
for schedule in ("gpipe", "1f1b"):
    ranks = on_ranks(partial(pipeline_by_hand, schedule))
    errors = [
        difference(grad, expected[name]) for _, _, grads in ranks for name, grad in grads.items()
    ]
    print(f"\n{schedule}: loss {ranks[-1][0]:.3f}, whole model {expected_loss:.3f}")
    print(f"largest relative error of a gradient {max(errors):.1e}")
    print(f"micro-batches alive at once, by rank: {[alive for _, alive, _ in ranks]}")
    print(draw(simulate(rank_actions(schedule, RANKS, RANKS, MICRO_BATCHES)), width=80))
    assert abs(ranks[-1][0] / expected_loss - 1) < 1e-5 and max(errors) < 1e-5
    assert ranks[0][1] == {"gpipe": MICRO_BATCHES, "1f1b": RANKS}[schedule]

# %% [markdown]
# Both wait equally long, which is the dots. But with `gpipe` a rank keeps the activations of all
# micro-batches, with `1f1b` only of as many as there are ranks after it: that is why it is the
# default. Ours runs torch's schedules over the same stages (`inner/parallel/pipeline/step.py`). Two
# stages for each rank and split backwards fill the gaps:


# %%
def our_pipeline_step(rank):
    loss, params = our_step(Degrees(pp=RANKS), ParallelConfig(schedule="zbv"))
    _, expected = whole_step()
    return loss, max(difference(param.grad, expected[name]) for name, param in params.items())


losses, errors = zip(*on_ranks(our_pipeline_step), strict=True)
print(f"zbv: loss {sum(losses):.3f}, largest relative error of a gradient {max(errors):.1e}")
assert abs(sum(losses) / expected_loss - 1) < 1e-5 and max(errors) < 1e-5
print(draw(simulate(rank_actions("zbv", RANKS, 2 * RANKS, MICRO_BATCHES)), width=80))
bubbles = {
    name: simulate(rank_actions(name, RANKS, RANKS * per_rank, MICRO_BATCHES)).bubble
    for name, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2))
}
print({name: f"{100 * bubble:.0f} %" for name, bubble in bubbles.items()})
assert bubbles["gpipe"] == bubbles["1f1b"] > bubbles["interleaved_1f1b"] > bubbles["zbv"]

# %% [markdown]
# Now change something: `MICRO_BATCHES = 8` makes every bubble smaller; `LAYERS = (range(3),
# range(3, 4))` gives the same gradients; cut `down` by rows instead of columns and see which
# gradients go wrong. `diloco mesh CONFIG 'islands=[{ranks: 2, mesh: {pp: 2}}]'` draws the schedule
# of a config, and [choosing a mesh](../mesh.md) says when which axis is worth its traffic.
