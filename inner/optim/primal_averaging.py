"""Generalized primal averaging (2512.17131): an optimizer steps one point, a slow average of it is part of the next.

With the base optimizer's point z, its average x, and the live params y, at which gradients are taken:

    y = mu_y x + (1 - mu_y) z,    z <- BaseStep(z, grad f(y)),    x <- mu_x x + (1 - mu_x) z
"""

import torch
from torch import Tensor, nn

from inner.params import local_tensor

OFFSET = "average_offset"


class PrimalAveraging(torch.optim.Optimizer):
    """Steps with `base`, at its own point, and leaves y in the parameters; groups and state are the base's.

    One more fp32 state for each parameter, sharded like it: x - z. Who writes params between two steps (an outer
    step, a donor's state) so moves all three points alike; where that state is absent, they are one.
    """

    def __init__(self, base: torch.optim.Optimizer, mu_x: float, mu_y: float) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups
        self.state = base.state
        self._mu_x, self._mu_y = mu_x, mu_y

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        states = [self._offset(param) for param in params]
        live, offsets = [local_tensor(param) for param in params], [local_tensor(state) for state in states]
        torch._foreach_add_(live, offsets, alpha=-self._mu_y)
        # From here on parameters hold z, so that weight decay is of z, and offsets hold x.
        torch._foreach_add_(offsets, live)
        self.base.step()
        torch._foreach_sub_(offsets, live)
        # The new x less the new z is what is left of the old x less the new z.
        torch._foreach_mul_(offsets, self._mu_x)
        torch._foreach_add_(live, offsets, alpha=self._mu_y)
        # Not before: optimizers make their own state where they find none at all.
        for param, state in zip(params, states, strict=True):
            self.state[param][OFFSET] = state

    def _offset(self, param: nn.Parameter) -> Tensor:
        held = self.state[param].get(OFFSET)
        return torch.zeros_like(param) if held is None else held


def kind(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class, and whether it is averaged: what its state is of."""
    if isinstance(optimizer, PrimalAveraging):
        return f"averaged {type(optimizer.base).__name__}"
    return type(optimizer).__name__
