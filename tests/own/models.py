"""An own model as an example of the contract in inner/parallel/own_model.py, and some that break
it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedConv(nn.Module):
    """A causal language model without attention: gated convolutions, learned positions,
    LayerNorm.
    """

    axes = ("dp_replicate", "dp_shard")

    def __init__(
        self, vocab_size: int, seq_len: int, dim: int = 32, num_layers: int = 2, width: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.positions = nn.Parameter(torch.empty(seq_len, dim))
        self.layers = nn.ModuleList(Block(dim, width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits (B, S, V)."""
        x_BSD = self.embed(tokens_BS) + self.positions[: tokens_BS.shape[1]]
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(self.norm(x_BSD))


class Block(nn.Module):
    """x + out(silu(gate(y)) * conv(y)) with y = norm(x); the convolution sees a position and those
    before it.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self._width = width
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, dim, width, groups=dim)
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """x and what the block adds to it, (B, S, D)."""
        y_BSD = self.norm(x_BSD)
        mixed_BSD = self.conv(F.pad(y_BSD.transpose(1, 2), (self._width - 1, 0))).transpose(1, 2)
        return x_BSD + self.out(F.silu(self.gate(y_BSD)) * mixed_BSD)


class Replicated(GatedConv):
    """The same for replicas only, with weights and a buffer of its own choice."""

    axes = ("dp_replicate",)

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        super().__init__(vocab_size, seq_len)
        self.register_buffer("scale", torch.empty(()), persistent=False)

    def normal_of(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a parameter's first values."""
        return (2.0, 0.0) if name == "norm.weight" else (0.0, 0.1)

    def fill_buffers(self) -> None:
        """Give the buffers their values."""
        self.get_buffer("scale").fill_(3.0)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits (B, S, V), scaled."""
        return super().forward(tokens_BS) * self.get_buffer("scale")


class NoBlocks(GatedConv):
    """Breaks the contract: FSDP would gather all weights at once."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        super().__init__(vocab_size, seq_len)
        self.layers = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]


class AnyAxis(GatedConv):
    """Breaks the contract: nobody knows how to spread it so."""

    axes = ("dp_shard", "tp")


class HiddenOnly(GatedConv):
    """Breaks the contract: no logits."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Hidden states."""
        return self.norm(self.embed(tokens_BS))


class Unused(GatedConv):
    """Breaks the contract: a parameter without a gradient."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        super().__init__(vocab_size, seq_len)
        self.spare = nn.Parameter(torch.empty(3))


class EmptyBuffer(GatedConv):
    """Breaks the contract: its buffer would have no values."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        super().__init__(vocab_size, seq_len)
        self.register_buffer("mask", torch.ones(seq_len))


class Fails(GatedConv):
    """Fails in its forward."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Positions for twice as many tokens as it has."""
        return self.head(self.embed(tokens_BS) + self.positions.repeat(2, 1))
