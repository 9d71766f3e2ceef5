"""FLOPs of training and the utilisation of the hardware (MFU, HFU). A multiply-add counts as two operations.

Forward and backward of one token, with N weights in matrix products, L layers, H heads of size E and S positions:

    6 N + 12 L H E S    attention as if every position saw all S positions: the convention of PaLM (2204.02311,
                        appendix B) and of most published MFU figures; causal attention needs half of the second term

The embedding's lookup, norms, softmax and RoPE are not counted; a tied table counts once, as the head. At dim 4096 and
S = 8192 (the 8b preset) this gives 57.9 GFLOP per token. MFU counts the operations of the model alone. HFU adds those
that the backward recomputes; these always include attention scores, which no fused kernel stores.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from inner.config import Recompute
from inner.model.sizes import ModelSizes

if TYPE_CHECKING:
    import torch

PEAK_SIZES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
"""Sizes of the square matrices that are multiplied to measure a device's peak."""
PEAK_SECONDS = 0.1
"""Measuring time for each size."""
PRODUCTS_PER_TIMING = 4
"""Matrix products between two readings of the clock."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token, forward and backward."""

    matmul: float
    attention: float
    """Operations of attention scores and of values weighted by them."""
    recomputed: float

    @property
    def total(self) -> float:
        """Operations that the model itself requires: the numerator of MFU."""
        return self.matmul + self.attention

    @property
    def hardware(self) -> float:
        """Operations that are executed: the numerator of HFU."""
        return self.total + self.recomputed


def flops_per_token(sizes: ModelSizes, seq_len: int, recompute: Recompute = "none") -> Flops:
    """Operations per token in a sequence of `seq_len`, by PaLM's convention."""
    # Operations of the scores and of the values weighted by them.
    attend = 4.0 * sizes.num_heads * sizes.head_dim * seq_len
    # Weights in matrix products: all but the embedding and the norms; a tied table counts as the head.
    num_weights = sizes.num_layers * sum(_layer_params(sizes)) + sizes.vocab_size * sizes.dim
    return Flops(
        matmul=6.0 * num_weights,
        attention=3.0 * attend * sizes.num_layers,
        recomputed=_recomputed_flops(sizes, attend, recompute) * sizes.num_layers,
    )


def _layer_params(sizes: ModelSizes) -> tuple[int, int, int, int]:
    """Number of weights of q, k and v, of the output projection, of gate and up, and of the down projection."""
    qkv = sizes.dim * (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    out = sizes.num_heads * sizes.head_dim * sizes.dim
    return qkv, out, 2 * sizes.dim * sizes.ffn_dim, sizes.dim * sizes.ffn_dim


def _recomputed_flops(sizes: ModelSizes, attend: float, recompute: Recompute) -> float:
    """Operations that one layer's backward repeats. A repetition stops before the last product, which is not needed."""
    scores = attend / 2
    qkv, out, gate_up, _ = _layer_params(sizes)
    if recompute == "attention":
        return scores + attend + 2 * qkv
    if recompute == "full":
        return scores + attend + 2 * (qkv + out + gate_up)
    return scores


@cache
def peak_flops(device: str, dtype: str) -> float | None:
    """Measure the operations per second of the device's fastest matrix product; None if it has none in `dtype`.

    `device` and `dtype` are named as in torch (cpu, cuda:0; bfloat16). The first call takes less than a second. On a
    CPU the figure is for the threads of this process on otherwise idle cores.
    """
    import torch

    where, kind = torch.device(device), getattr(torch, dtype)
    try:
        return max(_product_flops(size, where, kind) for size in PEAK_SIZES.get(where.type, PEAK_SIZES["cuda"]))
    except RuntimeError:
        return None


def _product_flops(size: int, device: "torch.device", dtype: "torch.dtype") -> float:
    """Operations per second of products of square matrices, the best of several runs."""
    import torch

    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = left @ right
    best, until = 0.0, time.perf_counter() + PEAK_SECONDS
    while time.perf_counter() < until:
        _synchronise(device)
        started_at = time.perf_counter()
        for _ in range(PRODUCTS_PER_TIMING):
            torch.mm(left, right, out=result)
        _synchronise(device)
        best = max(best, PRODUCTS_PER_TIMING * 2 * size**3 / (time.perf_counter() - started_at))
    return best


def _synchronise(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def utilisation(flops: float, tokens_per_second: float, num_ranks: int, peak: float) -> float:
    """Share of the ranks' peak that `tokens_per_second` of a whole island use, at `flops` operations per token.

    It is the MFU for `Flops.total` and the HFU for `Flops.hardware`; `peak` is that of one rank, from peak_flops.
    """
    return flops * tokens_per_second / (num_ranks * peak)
