# %% [markdown]
# # Ring attention, drawn
#
# A sequence that does not fit on one device is cut over the ranks of `cp`. All layers but one work
# on single positions and do not notice. Attention needs every earlier position: in **ring
# attention** (2310.01889) keys and values travel around the ranks, and each rank attends to what
# has just arrived. Two questions: how are results for some of the keys put together, and do all
# ranks have the same amount of work?

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import diloco  # finds `inner`, in a checkout and in an installed wheel

from inner.parallel.context.build import build_attend, rank_positions

torch.set_num_threads(1)  # a fork hangs if its parent has computed on several threads
RANKS, LENGTH, HEADS, HEAD_DIM = 4, 64, 2, 16

# %% [markdown]
# ## Merging: attention to some of the keys
#
# Softmax divides by a sum over **all** keys, which a rank does not have yet. So it keeps, beside
# its output so far, the logarithm of the sum of its exponentials so far (the log-sum-exp). Two
# results then merge exactly, in any order:


# %%
def attention_to(q, k, v, visible):
    """Output and log-sum-exp of queries (S, E) that see some of the keys (T, E)."""
    scores = (q @ k.T / HEAD_DIM**0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def merge(first, second):
    (out1, lse1), (out2, lse2) = first, second
    lse = torch.logaddexp(lse1, lse2)
    return out1 * (lse1 - lse).exp()[:, None] + out2 * (lse2 - lse).exp()[:, None], lse


generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(LENGTH, HEAD_DIM, generator=generator) for _ in range(3))
everything = torch.ones(LENGTH, LENGTH // 2, dtype=torch.bool)
halves = [
    attention_to(q, k[part], v[part], everything)
    for part in (slice(None, LENGTH // 2), slice(LENGTH // 2, None))
]
whole = F.scaled_dot_product_attention(q, k, v)
error = (merge(*halves)[0] - whole).abs().max().item()
print(f"two halves, merged, differ from attention to all keys by {error:.1e}")
assert error < 1e-5

# %% [markdown]
# ## Balance: who has how much to do
#
# Position 5 sees six keys, position 63 sees 64. If rank 0 gets the first quarter of the sequence
# and rank 3 the last, rank 3 has almost seven times the work, and the others wait for it.
# **Zigzag** cuts the sequence into twice as many chunks as ranks and gives a rank one from the
# front and its mirror image from the back. `rank_positions` is what the trainer uses.

# %%
orders = {
    "in order": [np.arange(LENGTH).reshape(RANKS, -1)[rank] for rank in range(RANKS)],
    "zigzag": [rank_positions("ring", LENGTH, RANKS, rank).numpy() for rank in range(RANKS)],
}


def scores_of(positions):
    """Scores that each rank computes in each step of the ring: in step s it has the keys of the
    rank s before it.
    """
    work = np.zeros((RANKS, RANKS), dtype=int)
    for rank in range(RANKS):
        for step in range(RANKS):
            keys = positions[(rank - step) % RANKS]
            work[rank, step] = (positions[rank][:, None] >= keys[None, :]).sum()
    return work


for name, positions in orders.items():
    work = scores_of(positions)
    # All pass keys on together, so a step lasts as long as that of the rank with most to do.
    print(
        f"{name:9} scores of the ranks {work.sum(1)}, as long as {work.max(0).sum()} scores in all"
    )
assert (scores_of(orders["zigzag"]).sum(1) == scores_of(orders["zigzag"]).sum() / RANKS).all()
assert scores_of(orders["in order"]).max(0).sum() > 1.5 * scores_of(orders["zigzag"]).max(0).sum()

# %% [markdown]
# The picture: each pixel is a score of one query (down) and one key (across). Its colour says which
# rank computes it, its shade in which step of the ring: the darkest at once, with its own keys, the
# lightest last. Above the diagonal nothing is computed.
#
# ![The scores of a causal sequence by rank and step, in order and in zigzag order; and the work of
# each step](../images/ring_attention.png)

# %%
colours = np.array([plt.get_cmap("tab10")(index)[:3] for index in range(RANKS)])
figure, axes = plt.subplots(2, 2, figsize=(9, 7.4), height_ratios=(3, 1.3), layout="constrained")
for column, (name, positions) in enumerate(orders.items()):
    owner = np.empty(LENGTH, dtype=int)
    for rank in range(RANKS):
        owner[positions[rank]] = rank
    step = (owner[:, None] - owner[None, :]) % RANKS
    shade = (0.25 + 0.75 * (1 - step / RANKS))[..., None]
    picture = shade * colours[owner][:, None, :] + (1 - shade)
    picture[np.triu_indices(LENGTH, 1)] = 1
    axes[0, column].imshow(picture, interpolation="nearest")
    axes[0, column].set(title=name, xlabel="key", ylabel="query")
    work, bottom = scores_of(positions), np.zeros(RANKS)
    for number in range(RANKS):
        alpha = 0.25 + 0.75 * (1 - number / RANKS)
        axes[1, column].barh(
            range(RANKS),
            work[:, number],
            left=bottom,
            color=colours,
            alpha=alpha,
            edgecolor="white",
        )
        # The next step begins when the slowest rank has done this one.
        bottom += work[:, number].max()
    axes[1, column].set(
        yticks=range(RANKS), yticklabels=[f"rank {rank}" for rank in range(RANKS)], xlim=(0, 1024)
    )
    axes[1, column].invert_yaxis()
    axes[1, column].set_xlabel("time, in scores")
figure.savefig("ring_attention.png", dpi=90)

# %% [markdown]
# With zigzag every step but the first has the same work on every rank. It is also simple work: the
# keys that arrive are either all before the second half of a rank's queries, or the first half of
# them is before all queries. So the kernels need no mask: only a rank's own keys are causal
# (`_score_block` in `inner/parallel/context/ring.py`).
#
# ## Ours, on four processes
#
# `build_attend("ring", group)` gives what the model calls in each layer. Every rank has the
# queries, keys and values of its own positions, and gets the outputs there. Forward and backward
# are compared with attention in one process:


# %%
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


METHOD = "ring"


def ring_errors(rank):
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(1, LENGTH, HEADS, HEAD_DIM, generator=generator) for _ in range(4))
    heads_first = [each.transpose(1, 2).clone().requires_grad_() for each in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    expected.backward(grad)
    mine = rank_positions(METHOD, LENGTH, RANKS, rank)
    here = [each[:, mine].clone().requires_grad_() for each in (q, k, v)]
    attend = build_attend(METHOD, dist.group.WORLD)
    found = attend(*here, None)
    found.backward(grad[:, mine])
    differences = [found - expected[:, mine]]
    differences += [
        a.grad - b.grad.transpose(1, 2)[:, mine] for a, b in zip(here, heads_first, strict=True)
    ]
    return [each.abs().max().item() for each in differences]


for rank, errors in enumerate(on_ranks(ring_errors)):
    print(
        f"rank {rank}: output and gradients of q, k, v differ by",
        " ".join(f"{error:.1e}" for error in errors),
    )
    assert max(errors) < 1e-5

# %% [markdown]
# Now change something. `METHOD = "all_gather"` sends the same bytes in one message. `METHOD =
# "ulysses"` exchanges heads for positions and needs as many heads as ranks: set `HEADS = 4`. With
# `RANKS = 8`, is the ring in order still less than twice as slow as zigzag? In a run it is
# `island.parallel.context`; [choosing a mesh](../mesh.md) says what each sends.
