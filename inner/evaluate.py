"""Loss of a model on windows of tokens: for a training step, and held out."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from inner.parallel.fsdp import drop_gathered

IGNORED = -100
"""A target that does not count."""


def summed_loss(model: nn.Module, window_BT: Tensor) -> Tensor:
    """Cross-entropy in nats summed over the window's valid targets (0-dim fp32); T = positions + 1."""
    # A token that is no target is still an input, and must be one that the embedding has.
    logits_BSV = model(window_BT[:, :-1].clamp(min=0))
    targets_BS = window_BT[:, 1:]
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def num_targets(window_BT: Tensor) -> int:
    """Valid targets of a window."""
    return int((window_BT[:, 1:] != IGNORED).sum())


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Each value summed over the island's ranks, in fp64. Every rank must call it."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


@torch.no_grad()
def evaluate(model: nn.Module, windows: Iterable[Tensor], device: torch.device) -> tuple[float, int]:
    """Loss in nats summed over every rank's windows, and their number of tokens; leaves training state alone.

    Every rank must call it, each with its own share; shares may differ in number, down to none.
    """
    loss, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    for window in _as_many_on_every_rank(windows, device):
        loss += summed_loss(model, window)
        tokens += num_targets(window)
    drop_gathered(model)
    loss_sum, num_tokens = sum_over_ranks([loss.item(), tokens], device)
    return loss_sum, int(num_tokens)


def _as_many_on_every_rank(windows: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """This rank's windows and enough empty ones: a forward is collective, all ranks must run as many."""
    mine = [window.to(device) for window in windows]
    most = torch.tensor(len(mine), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    empty = torch.full((1, 2), IGNORED, device=device)
    return mine + [empty] * (int(most) - len(mine))
