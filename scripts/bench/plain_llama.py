"""The decoder of inner/model/transformer.py in plain torch.nn, and its step, for a single process.

Shape suffixes are those of inner/model/transformer.py.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.model.sizes import ModelSizes

CLIP_NORM = 1.0


class PlainLlama(nn.Module):
    """Maps tokens (B, S) to logits (B, S, V)."""

    def __init__(self, sizes: ModelSizes, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.layers = nn.ModuleList([PlainBlock(sizes) for _ in range(sizes.num_layers)])
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.head = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)
        frequencies_P = sizes.rope_theta ** -(torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        angles_SP = torch.outer(torch.arange(seq_len), frequencies_P)
        self.register_buffer("cos_SP", angles_SP.cos(), persistent=False)
        self.register_buffer("sin_SP", angles_SP.sin(), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.head(self.last_hidden(tokens_BS))

    def last_hidden(self, tokens_BS: Tensor) -> Tensor:
        """Return the input of the head, (B, S, D)."""
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.cos_SP, self.sin_SP)
        return self.norm(x_BSD)


class PlainBlock(nn.Module):
    """A block of attention and SwiGLU."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        kv_dim = sizes.num_kv_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = nn.ModuleDict(
            {
                "q_proj": nn.Linear(sizes.dim, sizes.dim, bias=False),
                "k_proj": nn.Linear(sizes.dim, kv_dim, bias=False),
                "v_proj": nn.Linear(sizes.dim, kv_dim, bias=False),
                "out_proj": nn.Linear(sizes.dim, sizes.dim, bias=False),
            }
        )
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.ffn = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(sizes.dim, sizes.ffn_dim, bias=False),
                "up_proj": nn.Linear(sizes.dim, sizes.ffn_dim, bias=False),
                "down_proj": nn.Linear(sizes.ffn_dim, sizes.dim, bias=False),
            }
        )

    def forward(self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        x_BSD = self.attend(x_BSD, cos_SP, sin_SP)
        y_BSD = self.ffn_norm(x_BSD)
        gated = F.silu(self.ffn["gate_proj"](y_BSD)) * self.ffn["up_proj"](y_BSD)
        return x_BSD + self.ffn["down_proj"](gated)

    def attend(self, x_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        """Return the stream with the result of attention added."""
        y_BSD = self.attention_norm(x_BSD)
        q_BHSE, k_BKSE, v_BKSE = (
            self.attention[name](y_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q_BHSE = _rotate(q_BHSE, cos_SP, sin_SP)
        k_BKSE = _rotate(k_BKSE, cos_SP, sin_SP)
        y_BHSE = F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True
        )
        return x_BSD + self.attention["out_proj"](y_BHSE.transpose(1, 2).flatten(-2))


def _rotate(x_BHSE: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    first, second = x_BHSE.float().chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cos_SP - second * sin_SP, second * cos_SP + first * sin_SP), dim=-1
    )
    return rotated.type_as(x_BHSE)


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Tensor],
    dtype: torch.dtype,
) -> float:
    """Make one step on windows (B, S + 1) of token ids, with autocast and clipping.

    Return the mean loss. `model` maps tokens and targets, each (B, S), to their mean loss.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for windows in micro_batches:
        windows = windows.to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(windows[:, :-1], windows[:, 1:]) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return total.item()
