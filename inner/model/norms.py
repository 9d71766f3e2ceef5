"""The norms of a decoder: RMSNorm (1910.07467), RMSNorm with 1 + weight, and LayerNorm
(1607.06450).

Shape suffix: D the normed dimension; the others are any.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.model.sizes import ModelSizes


class RMSNormPlusOne(nn.Module):
    """RMSNorm that multiplies by 1 + weight, computed in fp32 and cast back, as in Gemma."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x_D: Tensor) -> Tensor:
        return norm_plus_one(x_D, self.weight, self.eps)


Norm = nn.RMSNorm | nn.LayerNorm | RMSNormPlusOne


def build_norm(sizes: ModelSizes, dim: int) -> Norm:
    """Build a norm over `dim` elements, of the kind that the decoder has."""
    kind = sizes.decoder.norm
    if kind == "rms":
        return nn.RMSNorm(dim, eps=sizes.norm_eps)
    if kind == "rms_plus_one":
        return RMSNormPlusOne(dim, sizes.norm_eps)
    return nn.LayerNorm(dim, eps=sizes.norm_eps, bias=kind == "layer")


def apply_norm(norm: Norm, x_D: Tensor, weight_D: Tensor, bias_D: Tensor | None) -> Tensor:
    """Compute what the norm computes, with these weights in place of its own."""
    if isinstance(norm, RMSNormPlusOne):
        return norm_plus_one(x_D, weight_D, norm.eps)
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x_D, norm.normalized_shape, weight_D, bias_D, norm.eps)
    return F.rms_norm(x_D, norm.normalized_shape, weight_D, norm.eps)


def norm_plus_one(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean of squares + eps) (1 + weight), in the dtype of x."""
    return F.rms_norm(x_D.float(), weight_D.shape, 1.0 + weight_D.float(), eps).to(x_D.dtype)
