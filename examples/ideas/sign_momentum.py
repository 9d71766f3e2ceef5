"""An outer optimizer that moves each parameter by the sign of its momentum, as Lion does inside
(2302.06675).
"""

import torch


class SignMomentum:
    """m = beta m + (1 - beta) g;  theta -= lr sign(m), with g the mean pseudo-gradient."""

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = beta

    def step(
        self, params: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor, lr: float
    ) -> None:
        """Step `params` and `momentum` (1-D fp32, CPU) in place."""
        momentum.mul_(self.beta).add_(mean * (1 - self.beta))
        params.sub_(momentum.sign() * lr)
