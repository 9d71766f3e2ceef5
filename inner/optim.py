"""The inner optimizer, its learning rate and the global gradient norm."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from inner.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, or SGD without momentum; weight decay on matrices, but neither on norms nor the embedding."""
    groups = [
        {"params": decayed, "weight_decay": decay}
        for decayed, decay in zip(_split_by_decay(model), (config.weight_decay, 0.0), strict=True)
    ]
    if config.name == "sgd":
        # Not fused: DTensor has no rule for it.
        return torch.optim.SGD(groups, lr=config.lr, foreach=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _split_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that decay, and those that do not."""
    decayed, kept = [], []
    for name, param in model.named_parameters():
        (kept if param.ndim < 2 or name == "embed.weight" else decayed).append(param)
    return decayed, kept


def lr_at(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of inner step `step` (the first is 0), pure; the last step and all after it get the least.

    For lr 1, min_lr_ratio 0, warmup_steps 2, total_steps 6, decay_steps 2:

    step       0    1    2     3     4     5
    constant  .5    1    1     1     1     1
    cosine    .5    1  .854   .5   .146    0
    wsd       .5    1    1     1    .5     0
    """
    done = step + 1
    if done <= config.warmup_steps:
        return config.lr * done / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    first = config.warmup_steps
    if config.schedule == "wsd":
        if config.decay_steps == 0:
            return config.lr
        first = max(first, total_steps - config.decay_steps)
    progress = min(max(done - first, 0) / max(total_steps - first, 1), 1.0)
    left = 1.0 - progress if config.schedule == "wsd" else (1.0 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def clip_gradients(model: nn.Module, clip_norm: float | None) -> Tensor:
    """Norm of all gradients over the whole mesh (0-dim, before clipping). Every rank must call it."""
    params = [param for param in model.parameters() if param.grad is not None]
    norm = get_total_norm([param.grad for param in params if param.grad is not None])
    if clip_norm is not None:
        clip_grads_with_norm_(params, clip_norm, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
