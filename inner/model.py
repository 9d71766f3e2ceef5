"""A Llama-style decoder that knows nothing of ranks.

Shape suffixes: B sequences, S positions, V vocabulary, D dim, H heads, K key-value heads, E head size, P = E/2.
Modules are named so that a parameter's full name never depends on a layout: layers.<number>.<part>.weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.presets import ModelSizes


class Attention(nn.Module):
    """Causal self-attention; several query heads share one key-value head."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        kv_dim = sizes.num_kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.k_proj = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.out_proj = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.q_norm = nn.RMSNorm(sizes.head_dim, eps=sizes.norm_eps) if sizes.qk_norm else None
        self.k_norm = nn.RMSNorm(sizes.head_dim, eps=sizes.norm_eps) if sizes.qk_norm else None

    def forward(self, x_BSD: Tensor, rope_2SP: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        q_BSHE = self.q_proj(x_BSD).view(B, S, -1, self.head_dim)
        k_BSKE = self.k_proj(x_BSD).view(B, S, -1, self.head_dim)
        v_BSKE = self.v_proj(x_BSD).view(B, S, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHE, k_BSKE = self.q_norm(q_BSHE), self.k_norm(k_BSKE)
        q_BSHE, k_BSKE = rotate(q_BSHE, rope_2SP), rotate(k_BSKE, rope_2SP)
        y_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BSKE.transpose(1, 2),
            v_BSKE.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.out_proj(y_BHSE.transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)
        self.up_proj = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)
        self.down_proj = nn.Linear(sizes.ffn_dim, sizes.dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class Block(nn.Module):
    """One layer: attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.ffn = FeedForward(sizes)

    def forward(self, x_BSD: Tensor, rope_2SP: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope_2SP)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class Transformer(nn.Module):
    """Tokens to logits. Build it on the meta device; `initialise` gives it values."""

    rope_freqs_P: Tensor

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.layers = nn.ModuleDict({str(number): Block(sizes) for number in range(sizes.num_layers)})
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        # Tied: the embedding is read twice. A second Parameter would come untied in to_empty().
        self.head = None if sizes.tie_embeddings else nn.Linear(sizes.dim, sizes.vocab_size, bias=False)
        self.register_buffer("rope_freqs_P", torch.empty(sizes.head_dim // 2), persistent=False)
        self.fill_tables()

    def fill_tables(self) -> None:
        """Computes the non-persistent buffers anew, in fp32; call it after to_empty()."""
        exponents_P = torch.arange(0, self.sizes.head_dim, 2, dtype=torch.float32) / self.sizes.head_dim
        self.rope_freqs_P.copy_(self.sizes.rope_theta**-exponents_P)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits (B, S, V) of the token that follows each position."""
        rope_2SP = rope_table(self.rope_freqs_P, tokens_BS.shape[1])
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, rope_2SP)
        x_BSD = self.norm(x_BSD)
        return F.linear(x_BSD, self.embed.weight) if self.head is None else self.head(x_BSD)


def rope_table(freqs_P: Tensor, num_positions: int) -> Tensor:
    """Cosines and sines (2, S, P) of every position's angles, fp32 on the device of `freqs_P`."""
    positions_S = torch.arange(num_positions, dtype=torch.float32, device=freqs_P.device)
    angles_SP = torch.outer(positions_S, freqs_P)
    return torch.stack((angles_SP.cos(), angles_SP.sin()))


def rotate(x_BSHE: Tensor, rope_2SP: Tensor) -> Tensor:
    """Turns the pairs (e, e + P) of each head by their position's angles; computed in fp32, cast back."""
    cos_SHP, sin_SHP = rope_2SP.unsqueeze(2)
    first, second = x_BSHE.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_SHP - second * sin_SHP, second * cos_SHP + first * sin_SHP), dim=-1)
    return turned.to(x_BSHE.dtype)
