"""The feed-forward of a block, and of the shared experts of a mixture.

Shape suffixes: B sequences, S positions, D dim, F hidden units.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from inner.config import Activation, DecoderConfig


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}
LLAMA = DecoderConfig()


class FeedForward(nn.Module):
    """Feed-forward with a hidden layer of `width`: down(act(gate x) * up x), or down(act(up x))
    without a gate.
    """

    def __init__(self, dim: int, width: int, decoder: DecoderConfig = LLAMA) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=decoder.ffn_bias) if decoder.gated else None
        self.up_proj = nn.Linear(dim, width, bias=decoder.ffn_bias)
        self.down_proj = nn.Linear(width, dim, bias=decoder.ffn_bias)
        self.activate = ACTIVATIONS[decoder.activation]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.activate(self.up_proj(x_BSD)))
        return self.down_proj(self.activate(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
