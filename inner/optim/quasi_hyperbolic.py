"""Quasi-hyperbolic AdamW (QHAdam, 1810.06801), the inner optimizer of MT-DAO (2510.05361).

A first moment with slow decay remembers the direction of all islands from one average to the next.
The gradient itself is the other part of the step, and reacts to changes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from inner.params import local_tensor


class QuasiHyperbolicAdamW(AdamW):
    """AdamW whose step is along (1 - w) g + w m instead of the first moment m.

        theta <- (1 - lr decay) theta - lr ((1 - w) g + w m / (1 - beta1^t)) / (sqrt(v / (1 -
        beta2^t)) + eps)

    Its state is AdamW's, fp32, so checkpoints, memory and `outer.moments` are as for AdamW. A
    weight w of 1 is AdamW.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum_weight: float,
    ) -> None:
        super().__init__(groups, lr, betas, eps, fused=True)
        self._gradient_weight = 1.0 - momentum_weight

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._turn_to_gradient(param, group)

    def _turn_to_gradient(self, param: Tensor, group: dict[str, Any]) -> None:
        """Correct AdamW's step, which was along m: replace the share 1 - w of it by a step along
        the gradient.
        """
        state = self.state[param]
        (beta1, beta2) = group["betas"]
        correction1, correction2 = (1.0 - beta ** state["step"] for beta in (beta1, beta2))
        assert param.grad is not None, "step() must leave out parameters without a gradient"
        ahead = (local_tensor(state["exp_avg"]) / correction1).sub_(local_tensor(param.grad))
        size = (local_tensor(state["exp_avg_sq"]) / correction2).sqrt_().add_(group["eps"])
        local_tensor(param).addcdiv_(ahead, size, value=group["lr"] * self._gradient_weight)
