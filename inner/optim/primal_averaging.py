"""Generalized primal averaging (2512.17131): gradients are taken between an optimizer's point and
its slow average.

With the base optimizer's point z, its average x, and the live params y, at which gradients are
taken:

    y = mu_y x + (1 - mu_y) z,    z <- BaseStep(z, grad f(y)),    x <- mu_x x + (1 - mu_x) z
"""

import torch

from inner.params import local_tensor

OFFSET = "average_offset"


class PrimalAveraging(torch.optim.Optimizer):
    """Steps `base` at its point z and leaves y in the parameters. Param groups and state are those
    of `base`.

    Each parameter has one more fp32 state, x - z, sharded like the parameter. Code that writes
    params between steps (an outer step, a donor's state) therefore moves x, y and z by the same
    amount. Without that state, x, y and z are equal.
    """

    def __init__(self, base: torch.optim.Optimizer, mu_x: float, mu_y: float) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups
        self.state = base.state
        self._mu_x = mu_x
        self._mu_y = mu_y

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        params = [
            param
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        states = [self.state[param].get(OFFSET) for param in params]
        states = [
            torch.zeros_like(p) if state is None else state
            for p, state in zip(params, states, strict=True)
        ]
        local_params = [local_tensor(param) for param in params]
        offsets = [local_tensor(state) for state in states]
        torch._foreach_add_(local_params, offsets, alpha=-self._mu_y)
        # From here on the parameters hold z, so that weight decay acts on z, and the offsets hold
        # x.
        torch._foreach_add_(offsets, local_params)
        self.base.step()
        torch._foreach_sub_(offsets, local_params)
        # x_new - z_new = mu_x (x_old - z_new)
        torch._foreach_mul_(offsets, self._mu_x)
        torch._foreach_add_(local_params, offsets, alpha=self._mu_y)
        # Store the offsets after the step, because optimizers create their own state only if a
        # parameter has no state at all.
        for param, state in zip(params, states, strict=True):
            self.state[param][OFFSET] = state


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of the optimizer and whether it is averaged, which together determine the
    layout of its state.
    """
    if isinstance(optimizer, PrimalAveraging):
        return f"averaged {type(optimizer.base).__name__}"
    return type(optimizer).__name__
