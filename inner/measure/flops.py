"""How much arithmetic training is, and how much of the machine's it uses. A multiply-add is two operations.

Forward and backward of one token, N weights in matrix products, L layers, H heads of size E, S positions:

    6 N + 12 L H E S         attention counted as if every position saw all S: the convention of PaLM (2204.02311,
                             appendix B) and of most published MFU figures
    6 N + 6 L H E (S + 1)    causal attention counted exactly: position s sees s of S keys

The embedding's lookup, norms, softmax and RoPE count nothing; a tied table counts once, as the head. At dim 4096 and
S = 8192 (the 8b preset) the first is 57.9 GFLOP a token, the second 51.5. MFU counts the model's operations alone; HFU
also what the backward pass computes again, which is nothing unless asked for, but for attention's scores: a fused
kernel never stores them.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from inner.config import Recompute
from inner.presets import ModelSizes

if TYPE_CHECKING:
    import torch

PEAK_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
"""Square matrices multiplied to find a device's peak."""
PEAK_SECONDS = 0.1
"""Spent on each of them."""
PRODUCTS = 4
"""Between two looks at the clock."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one token, forward and backward."""

    matmul: float
    """Products with weights."""
    attention: float
    """Scores, and values weighted by them."""
    recomputed: float
    """Computed a second time in the backward pass."""

    @property
    def total(self) -> float:
        """What the model needs, however it is computed: the numerator of MFU."""
        return self.matmul + self.attention

    @property
    def hardware(self) -> float:
        """What is executed: the numerator of HFU."""
        return self.total + self.recomputed


def matmul_params(sizes: ModelSizes) -> int:
    """Weights that every token is multiplied with: all but the embedding and the norms; a tied table is the head."""
    return sizes.num_layers * sum(_layer_params(sizes)) + sizes.vocab_size * sizes.dim


def flops_per_token(
    sizes: ModelSizes, seq_len: int, recompute: Recompute = "none", *, is_causal_exact: bool = False
) -> Flops:
    """Operations of one token in a sequence of `seq_len`; the convention is PaLM's unless `is_causal_exact`."""
    num_keys = (seq_len + 1) / 2 if is_causal_exact else seq_len
    # Scores, and values weighted by them.
    attend = 4.0 * sizes.num_heads * sizes.head_dim * num_keys
    return Flops(
        matmul=6.0 * matmul_params(sizes),
        attention=3.0 * attend * sizes.num_layers,
        recomputed=_recomputed(sizes, attend, recompute) * sizes.num_layers,
    )


def _layer_params(sizes: ModelSizes) -> tuple[int, int, int, int]:
    """Weights of q, k and v, of the output projection, of gate and up, and of the down projection."""
    qkv = sizes.dim * (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    out = sizes.num_heads * sizes.head_dim * sizes.dim
    return qkv, out, 2 * sizes.dim * sizes.ffn_dim, sizes.dim * sizes.ffn_dim


def _recomputed(sizes: ModelSizes, attend: float, recompute: Recompute) -> float:
    """What one layer's backward computes again. A repetition stops before its last product: nothing needs that."""
    scores = attend / 2
    qkv, out, gate_up, _ = _layer_params(sizes)
    if recompute == "attention":
        return scores + attend + 2 * qkv
    if recompute == "full":
        return scores + attend + 2 * (qkv + out + gate_up)
    return scores


@cache
def peak_flops(device: str, dtype: str) -> float | None:
    """Operations a second of the device's fastest matrix product, measured; None if it has none in `dtype`.

    `device` as torch names it (cpu, cuda:0), `dtype` too (bfloat16). Takes less than a second, once. On a CPU it is
    what this process's threads can do while nobody else wants the cores.
    """
    import torch

    where, kind = torch.device(device), getattr(torch, dtype)
    try:
        return max(_product_flops(size, where, kind) for size in PEAK_SIZES.get(where.type, PEAK_SIZES["cuda"]))
    except RuntimeError:
        return None


def _product_flops(size: int, device: "torch.device", dtype: "torch.dtype") -> float:
    """Operations a second of products of square matrices, the best of some runs."""
    import torch

    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = left @ right
    best, until = 0.0, time.perf_counter() + PEAK_SECONDS
    while time.perf_counter() < until:
        _wait_for(device)
        started_at = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=result)
        _wait_for(device)
        best = max(best, PRODUCTS * 2 * size**3 / (time.perf_counter() - started_at))
    return best


def _wait_for(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def utilisation(flops: float, tokens_per_second: float, num_ranks: int, peak: float) -> float:
    """Share of the ranks' peak that a whole island's `tokens_per_second` use, at `flops` operations a token.

    MFU with `Flops.total`, HFU with `Flops.hardware`; `peak` is one rank's, from peak_flops.
    """
    return flops * tokens_per_second / (num_ranks * peak)
