"""Builds the inner optimizers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from inner.config import OptimizerConfig, ParamGroup
from inner.errors import InputError
from inner.expert_names import is_stacked
from inner.foreign.name_pattern import NamePattern
from inner.optim.muon.muon import Muon
from inner.optim.own_optimizer import build_own_optimizer
from inner.optim.primal_averaging import PrimalAveraging
from inner.optim.quasi_hyperbolic import QuasiHyperbolicAdamW
from inner.optim.rounded_adamw import RoundedAdamW
from inner.params import LocalParams


@dataclass(frozen=True)
class Rounding:
    """What the random bits follow from that round states in bf16."""

    params: LocalParams
    seed: int


LOOKED_UP = ("embed.weight", "position.weight")
"""Parameters of two dimensions whose rows are looked up."""


def build_optimizers(
    stages: Sequence[nn.Module],
    all_names: list[str],
    config: OptimizerConfig,
    muon_dtype: torch.dtype = torch.float32,
    rounding: Rounding | None = None,
) -> list[Optimizer]:
    """Build optimizers that together step every parameter once: a built-in or an own optimizer, and
    AdamW for other parameters.

    Each is wrapped in PrimalAveraging if the config asks for it; the live parameters are then its
    y. The groups contain `lr_scale`, see learning_rate.set_lr. `all_names` are the parameters of
    the whole model, of which `stages` hold some. `muon_dtype` is the dtype of Muon's matrix
    products. `rounding` is needed for states in bf16. Raises InputError if a group's pattern
    selects none of the parameters.
    """
    group_of = _assign_groups(all_names, config.groups)
    # Parameters with equal settings form one optimizer group.
    params: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    for stage in stages:
        for name, param in stage.named_parameters():
            params.setdefault(_settings(name, param, group_of[name], config), []).append(param)
    groups: dict[str, list[dict[str, Any]]] = {}
    for (name, lr_scale, decay), members in params.items():
        groups.setdefault(name, []).append(
            {"params": members, "lr_scale": lr_scale, "weight_decay": decay}
        )
    names = [name for name in dict.fromkeys((config.name, "adamw")) if name in groups]
    builders = BUILDERS | {"muon": partial(_build_muon, muon_dtype)}
    if config.state_dtype == "bfloat16":
        assert rounding is not None, (
            "states in bf16 need the rectangles that this rank holds, and a seed"
        )
        builders |= {"adamw": partial(_build_rounded_adamw, rounding)}
    optimizers = [builders.get(name, build_own_optimizer)(groups[name], config) for name in names]
    if config.averaging is None:
        return optimizers
    return [PrimalAveraging(base, config.averaging.x, config.averaging.y) for base in optimizers]


def _build_adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    if config.momentum_weight < 1:
        return QuasiHyperbolicAdamW(
            groups, config.lr, config.betas, config.eps, config.momentum_weight
        )
    return AdamW(groups, config.lr, config.betas, config.eps, fused=True)


BUILDERS: dict[str, Callable[[list[dict[str, Any]], OptimizerConfig], Optimizer]] = {
    "adamw": _build_adamw,
    # DTensor does not support fused SGD.
    "sgd": lambda groups, config: SGD(groups, config.lr, foreach=True),
}


def _build_rounded_adamw(
    rounding: Rounding, groups: list[dict[str, Any]], config: OptimizerConfig
) -> Optimizer:
    return RoundedAdamW(groups, config.lr, config.betas, config.eps, rounding.params, rounding.seed)


def _build_muon(
    dtype: torch.dtype, groups: list[dict[str, Any]], config: OptimizerConfig
) -> Optimizer:
    return Muon(groups, config.lr, config.muon_momentum, dtype, config.muon_row_beta)


def _settings(
    name: str, param: Tensor, group: ParamGroup | None, config: OptimizerConfig
) -> tuple[str, float, float]:
    """Return optimizer, lr_scale and weight decay: the group's values, or the defaults for this
    kind of parameter.
    """
    is_matrix = (param.ndim == 2 or is_stacked(name, param.ndim)) and name not in LOOKED_UP
    weight_decay = config.weight_decay if is_matrix else 0.0
    optimizer = config.name
    # Embedding and head are matrices, too, but they are look-up tables rather than maps of the
    # residual stream.
    if config.name == "muon" and not (is_matrix and name.startswith("layers.")):
        optimizer = "adamw"
    if group is None:
        return optimizer, 1.0, weight_decay
    weight_decay = weight_decay if group.weight_decay is None else group.weight_decay
    return group.optimizer or optimizer, group.lr_scale, weight_decay


def _assign_groups(
    all_names: list[str], groups: tuple[ParamGroup, ...]
) -> dict[str, ParamGroup | None]:
    """Return the first group whose pattern matches, by parameter name. Raises InputError if a group
    gets no parameter.
    """
    patterns = [(group, NamePattern(group.pattern)) for group in groups]
    matches = {
        name: [group for group, pattern in patterns if pattern.is_in(name)] for name in all_names
    }
    for number, group in enumerate(groups):
        competing = [found for found in matches.values() if group in found]
        where = f"optimizer.groups[{number}]: pattern {group.pattern!r}"
        if not competing:
            near = get_close_matches(group.pattern.replace("\\", ""), all_names, n=1, cutoff=0.0)[0]
            raise InputError(
                f"{where} matches none of the model's {len(all_names)} parameters; it is a regular "
                "expression searched "
                f"for in names like {all_names[0]!r}; the nearest name is {near!r}"
            )
        if not any(found[0] is group for found in competing):
            raise InputError(
                f"{where} matches only parameters that earlier groups take, the first by "
                f"{competing[0][0].pattern!r}; "
                "put the narrower pattern first, or remove this group"
            )
    return {name: found[0] if found else None for name, found in matches.items()}
