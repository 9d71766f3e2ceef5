"""The optimizers of the user's own loop, and AdamW's moments, which islands average with
`outer.moments`.
"""

from collections.abc import Sequence

import torch

from diloco.errors import ConfigError
from inner.optim.moments import ParamsAndMoments
from inner.params import LocalParams

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def with_moments(params: LocalParams, optimizers: Optimizers) -> ParamsAndMoments:
    """Return the parameters with AdamW's moments, for `outer.moments`.

    Raises ConfigError for other optimizers and for optimizers that have made a step.
    """
    found = as_list(optimizers)
    if not found or any(type(optimizer) is not torch.optim.AdamW for optimizer in found):
        got = ", ".join(type(optimizer).__name__ for optimizer in found) or "none"
        raise ConfigError(f"outer.moments averages the moments of torch.optim.AdamW; got the optimizers: {got}")
    if any(optimizer.state for optimizer in found):
        raise ConfigError(
            "outer.moments: create Islands before the optimizer's first step, and load its state afterwards"
        )
    held = {param for optimizer in found for group in optimizer.param_groups for param in group["params"]}
    trained = [param for index in range(len(params.slices)) for param in params.copies(index)]
    if any(param not in held for param in trained):
        raise ConfigError("outer.moments: the optimizers do not hold all parameters that require gradients")
    return ParamsAndMoments(params, found)


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the optimizers without the wrappers that accelerate and Fabric put around them."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers or []
    return [innermost(optimizer) for optimizer in given]


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(inside := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inside
    return optimizer
