"""Norms, inner products and distances of parts, summed in fp64, where squares of fp32 values cannot overflow."""

from collections.abc import Sequence

import numpy as np
import torch

CHUNK = 16384
"""Number of elements that are converted to fp64 at once."""


def norm(values: torch.Tensor) -> float:
    """The Euclidean norm of a 1-D fp32 tensor."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).item()


def inner_product(left: torch.Tensor, right: torch.Tensor) -> float:
    """The inner product of two 1-D fp32 tensors of equal length."""
    pairs = zip(left.split(CHUNK), right.split(CHUNK), strict=True)
    return sum(torch.dot(a.double(), b.double()).item() for a, b in pairs)


def gram(parts: Sequence[torch.Tensor]) -> np.ndarray:
    """The Gram matrix, inner products of all pairs of parts: (n, n) fp64.

    Distances between the parts x_i and points sum_i c_i x_i follow from this matrix and c alone. An iterative rule
    therefore reads the parts only twice, here and for its result.
    """
    total = np.zeros((len(parts), len(parts)))
    for columns in zip(*(values.split(CHUNK) for values in parts), strict=True):
        # numpy detects that both operands are the same matrix and does half of the work; torch does not.
        rows = np.stack([values.numpy() for values in columns], dtype=np.float64)
        total += rows @ rows.T
    return total


def distances(products: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Distance of each x_i from sum_i c_i x_i, (n,) fp64. The c_i sum to 1; `products` is the x_i's Gram matrix."""
    # |x_i - z|^2 = G_ii - 2 (G c)_i + c G c, which rounding can make slightly negative where it is zero.
    along = products @ coefficients
    squares = products.diagonal() - 2 * along + coefficients @ along
    return np.sqrt(squares.clip(min=0))
