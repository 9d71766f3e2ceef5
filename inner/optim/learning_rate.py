"""The schedule of the learning rate."""

import math

from torch.optim import Optimizer

from inner.config import OptimizerConfig


def lr_at(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of inner step `step`, counted from 0. The last step and all later
    steps get the lowest rate.

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


def set_lr(optimizers: list[Optimizer], lr: float) -> None:
    """Set every group's learning rate to `lr` times its `lr_scale`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
