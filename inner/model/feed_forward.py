"""The feed-forward of a block, and of the shared experts of a mixture.

Shape suffixes: B sequences, S positions, D dim.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """SwiGLU feed-forward with a hidden layer of `width`."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
