"""The optimizers of the user's own loop, and AdamW's moments, which islands average with
`outer.moments`.
"""

from collections.abc import Iterable, Sequence

import torch

from diloco.errors import ConfigError
from diloco.own_loop.model.ranks import on_every_rank
from inner.optim.moments import ParamsAndMoments
from inner.params import LocalParams
from outer.space.ranks import RankGroup

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def with_moments(
    params: LocalParams, optimizers: Optimizers, ranks: RankGroup | None = None
) -> ParamsAndMoments:
    """Return the parameters with the moments of those that AdamW steps, for `outer.moments`.

    Every rank must call it; without `ranks` this process is alone. Raises ConfigError on every rank
    without AdamW, and for an AdamW that has made a step.
    """
    ranks = ranks or RankGroup()
    adam, stepped = on_every_rank(ranks, lambda: find_adam(params, optimizers))
    names: set[str] = set().union(*ranks.gather(stepped))
    if not names:
        got = ", ".join(type(optimizer).__name__ for optimizer in as_list(optimizers)) or "none"
        raise ConfigError(
            f"outer.moments averages the moments of torch.optim.AdamW; got the optimizers: {got}"
        )
    return ParamsAndMoments(params, adam, names)


def find_adam(
    params: LocalParams, optimizers: Optimizers
) -> tuple[Sequence[torch.optim.Optimizer], set[str]]:
    """Return this rank's AdamW optimizers, and the names of the parameters that they step. Raises
    ConfigError.
    """
    found = as_list(optimizers)
    adam = [optimizer for optimizer in found if type(optimizer) is torch.optim.AdamW]
    if any(optimizer.state for optimizer in adam):
        raise ConfigError(
            "outer.moments: create Islands before the optimizer's first step, and load its state "
            "afterwards"
        )
    stepped = params_in(adam)
    held = params_in(found)
    names: set[str] = set()
    for index, part in enumerate(params.slices):
        copies = params.copies(index)
        if any(param not in held for param in copies):
            raise ConfigError(
                "outer.moments: the optimizers do not hold all parameters that require gradients: "
                f"{part.name!r} is in none; pass all optimizers"
            )
        if all(param in stepped for param in copies):
            names.add(part.name)
    return adam, names


def params_in(optimizers: Sequence[torch.optim.Optimizer]) -> set[torch.Tensor]:
    return {
        param
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    }


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the optimizers without the containers and wrappers of trainers, accelerate and
    Fabric.
    """
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers or []
    return [inside for optimizer in given for inside in unpack(innermost(optimizer))]


def unpack(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a container, which is one itself and has them as `optimizers`."""
    inside = getattr(optimizer, "optimizers", None)
    return as_list(list(inside)) if isinstance(inside, Iterable) else [optimizer]


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(inside := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inside
    return optimizer


def learning_rate(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Return the learning rate of the first group that has one, 0 without any."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return next((float(group["lr"]) for group in groups if "lr" in group), 0.0)
