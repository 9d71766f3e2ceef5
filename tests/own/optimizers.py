"""An own optimizer as an example of the contract in inner/optim/own_optimizer.py, and some that
break it.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Steps along the sign of an interpolated momentum (2302.06675), with decoupled weight decay.
    Elementwise.

    c = beta1 m + (1 - beta1) g;    w <- w - lr (sign(c) + decay w);    m <- beta2 m + (1 - beta2) g

    Signs are softened to c / (|c| + softness), so that rounding cannot turn a step around.
    """

    def __init__(
        self,
        params: list[dict],
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.99,
        softness: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._beta1, self._beta2, self._softness = beta1, beta2, softness

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    direction = self._direction(param, param.grad)
                    param.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                        direction, alpha=-group["lr"]
                    )

    def _direction(self, param: Tensor, grad: Tensor) -> Tensor:
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
        mixed = momentum.lerp(grad, 1 - self._beta1)
        momentum.lerp_(grad, 1 - self._beta2)
        return mixed / (mixed.abs() + self._softness)


class UnitStep(Optimizer):
    """Steps along each matrix's gradient, scaled to norm 1. Not elementwise, and it says nothing of
    shards.
    """

    def __init__(self, params: list[dict], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad / param.grad.norm(), alpha=-group["lr"])


class UnitStepOfShards(UnitStep):
    """The same for DTensors, whose norm is that of the whole matrix."""

    handles_shards = True


class OwnRate(UnitStep):
    """Breaks the contract: it keeps the rate that it was built with."""

    def __init__(self, params: list[dict], lr: float) -> None:
        super().__init__(params, lr)
        self._lr = lr

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-self._lr)


class CountsInGroups(UnitStep):
    """Breaks the contract: a resumed run would count from 0 again."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


class CountsInState(UnitStep):
    """Breaks the contract: only tensors are saved."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["steps"] = self.state[param].get("steps", 0) + 1


def not_a_class(params: list[dict], lr: float) -> UnitStep:
    """No subclass of Optimizer."""
    return UnitStep(params, lr)
