"""FLOPs of training, by formula. A multiply-add counts as two operations. No torch here.

Forward and backward of one token, with N weights in matrix products, L layers, H heads of size E
and S positions:

    6 N + 12 L H E S    attention as if every position saw all S positions: the convention of PaLM (2204.02311,
                        appendix B) and of most published MFU figures; causal attention needs half of the second term

The embedding's lookup, norms, softmax and RoPE are not counted; a tied table counts once, as the
head. At dim 4096 and S = 8192 (the 8b preset) the formula gives 57.9 GFLOP per token. If the
backward recomputes anything, it also recomputes attention scores, because no fused kernel stores
them.
"""

from dataclasses import dataclass

from inner.config import Recompute
from inner.model.block_params import block_params
from inner.model.sizes import ModelSizes


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token, forward and backward."""

    matmul: float
    attention: float
    """Operations of attention scores and of the sums of values that they weight."""
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
    """Return the operations per token in a sequence of `seq_len`, by PaLM's convention."""
    # Operations of the scores, and of the values weighted by them.
    attend = 4.0 * sizes.num_heads * sizes.head_dim * seq_len
    # Weights in matrix products: all except the embedding and the norms; a tied table counts as the
    # head.
    num_weights = sizes.num_layers * sum(_layer_params(sizes)) + sizes.vocab_size * sizes.dim
    return Flops(
        matmul=6.0 * num_weights,
        attention=3.0 * attend * sizes.num_layers,
        recomputed=_recomputed_flops(sizes, attend, recompute) * sizes.num_layers,
    )


def head_layers(sizes: ModelSizes, seq_len: int, recompute: Recompute = "none") -> float:
    """Return the cost of the head in layers: its operations divided by those of one layer with
    recomputation.

    It is 1.8 for the 8b preset at 8192 positions, 3.7 for 1b at 2048, and 0.03 for 1m, whose vocabulary is
    bytes.
    """
    head = 6.0 * sizes.vocab_size * sizes.dim
    return head * sizes.num_layers / (flops_per_token(sizes, seq_len, recompute).hardware - head)


def _layer_params(sizes: ModelSizes) -> tuple[int, int, int, int]:
    """Return the number of weights of q, k and v, of the output projection, of gate and up, and of
    the down projection.
    """
    matrices = [param for param in block_params(sizes, has_experts=False) if param.is_matrix]
    attention = [param for param in matrices if param.module.startswith("attention.")]
    ffn = [param for param in matrices if param.module.startswith("ffn.")]
    qkv = sum(param.numel(sizes) for param in attention if param.is_input)
    out = sum(param.numel(sizes) for param in attention if not param.is_input)
    gate_up = sum(param.numel(sizes) for param in ffn if param.is_input)
    down = sum(param.numel(sizes) for param in ffn if not param.is_input)
    return qkv, out, gate_up, down


def _recomputed_flops(sizes: ModelSizes, attend: float, recompute: Recompute) -> float:
    """Return the operations that one layer's backward repeats. The last matrix product is not
    needed and not repeated.
    """
    scores = attend / 2
    qkv, out, gate_up, _ = _layer_params(sizes)
    if recompute == "attention":
        return scores + attend + 2 * qkv
    if recompute == "full":
        return scores + attend + 2 * (qkv + out + gate_up)
    return scores
