"""The inner optimizers and their learning rate."""

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from inner.config import OptimizerConfig, ParamGroup
from inner.errors import InputError
from inner.muon import Muon
from inner.primal_averaging import PrimalAveraging


@dataclass(frozen=True)
class Treatment:
    """How a parameter is stepped; parameters of one treatment are a group of the optimizer."""

    optimizer: str
    lr_scale: float
    weight_decay: float


def build_optimizers(
    parts: list[nn.Module], all_names: list[str], config: OptimizerConfig
) -> list[torch.optim.Optimizer]:
    """Optimizers that step every parameter of `parts` once: AdamW, SGD without momentum, or Muon and AdamW.

    Each is averaged if the config says so: the parameters are then PrimalAveraging's y, for whoever reads them.
    Their groups carry `lr_scale`, see set_lr. `all_names` are the whole model's parameters, of which a pipeline stage
    holds some. Raises InputError if a group's pattern takes none of them.
    """
    taken_by = _taken_by(all_names, config.groups)
    params: dict[Treatment, list[nn.Parameter]] = {}
    for part in parts:
        for name, param in part.named_parameters():
            params.setdefault(_treatment(name, param, taken_by[name], config), []).append(param)
    groups: dict[str, list[dict[str, Any]]] = {}
    for treatment, members in params.items():
        groups.setdefault(treatment.optimizer, []).append(
            {"params": members, "lr_scale": treatment.lr_scale, "weight_decay": treatment.weight_decay}
        )
    optimizers = [BUILDERS[name](groups[name], config) for name in BUILDERS if name in groups]
    if config.averaging is None:
        return optimizers
    return [PrimalAveraging(base, config.averaging.x, config.averaging.y) for base in optimizers]


def set_lr(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Gives every group the learning rate times its scale."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return Muon(groups, lr=config.lr, momentum=config.muon_momentum)


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    # Not fused: DTensor has no rule for it.
    return torch.optim.SGD(groups, lr=config.lr, foreach=True)


BUILDERS = {"muon": _muon, "adamw": _adamw, "sgd": _sgd}


def _treatment(name: str, param: nn.Parameter, group: ParamGroup | None, config: OptimizerConfig) -> Treatment:
    """What the group says, and where it says nothing or there is none, what the parameter's kind asks for."""
    is_matrix = param.ndim == 2 and name != "embed.weight"
    weight_decay = config.weight_decay if is_matrix else 0.0
    optimizer = config.name
    # Embedding and head are matrices, too, but look-up tables and not maps of the residual stream.
    if config.name == "muon" and not (is_matrix and name.startswith("layers.")):
        optimizer = "adamw"
    if group is None:
        return Treatment(optimizer, 1.0, weight_decay)
    return Treatment(
        group.optimizer or optimizer,
        group.lr_scale,
        weight_decay if group.weight_decay is None else group.weight_decay,
    )


def _taken_by(all_names: list[str], groups: tuple[ParamGroup, ...]) -> dict[str, ParamGroup | None]:
    """The group of each parameter: the first whose pattern its name matches. Raises InputError."""
    matches = {name: [group for group in groups if re.search(group.pattern, name)] for name in all_names}
    for number, group in enumerate(groups):
        rivals = [found for found in matches.values() if group in found]
        where = f"optimizer.groups[{number}]: pattern {group.pattern!r}"
        if not rivals:
            near = get_close_matches(group.pattern.replace("\\", ""), all_names, n=1, cutoff=0.0)[0]
            raise InputError(
                f"{where} matches none of the model's {len(all_names)} parameters; it is a regular expression searched "
                f"for in names like {all_names[0]!r}; the nearest name is {near!r}"
            )
        if not any(found[0] is group for found in rivals):
            raise InputError(
                f"{where} matches only parameters that earlier groups take, the first by {rivals[0][0].pattern!r}; "
                "put the narrower pattern first, or remove this group"
            )
    return {name: found[0] if found else None for name, found in matches.items()}


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
