"""Norms, inner products and distances of parts, summed in fp64, in which squares of fp32 values
cannot overflow.
"""

from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch

CHUNK = 16384
"""Number of elements that are converted to fp64 at once."""
STRETCH_ELEMENTS = 1 << 16
"""Number of elements that are summed in fp32, where speed matters more than the last digit or an
overflow to inf."""


def norm(values: torch.Tensor) -> float:
    """Return the Euclidean norm of a 1-D fp32 tensor."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).item()


def fast_norm(values: torch.Tensor) -> float:
    """Return the Euclidean norm up to rounding, from fp32 sums unless they overflow."""
    length = sum_of_squares(values) ** 0.5
    return length if isfinite(length) else norm(values)


def inner_product(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the inner product of two 1-D fp32 tensors of equal length."""
    pairs = zip(left.split(CHUNK), right.split(CHUNK), strict=True)
    return sum(torch.dot(a.double(), b.double()).item() for a, b in pairs)


def gram(parts: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the Gram matrix, the inner products of all pairs of parts: (n, n) fp64.

    Distances between the parts x_i and points sum_i c_i x_i follow from this matrix and c alone. An
    iterative rule therefore reads the parts only twice, here and for its result.
    """
    total = np.zeros((len(parts), len(parts)))
    for columns in zip(*(values.split(CHUNK) for values in parts), strict=True):
        # numpy detects that both operands are the same matrix and does half of the work; torch does
        # not.
        rows = np.stack([values.numpy() for values in columns], dtype=np.float64)
        total += rows @ rows.T
    return total


def distances(products: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Return the distance of each x_i from sum_i c_i x_i, (n,) fp64. The c_i sum to 1;
    `products` is the x_i's Gram matrix.
    """
    # |x_i - z|^2 = G_ii - 2 (G c)_i + c G c. Rounding can make it slightly negative where it should
    # be zero.
    along = products @ coefficients
    squares = products.diagonal() - 2 * along + coefficients @ along
    return np.sqrt(squares.clip(min=0))


def sum_of_squares(values: torch.Tensor) -> float:
    """Return the squared L2 norm of 1-D fp32 values: sums of short stretches in fp32, which are
    added in double precision.
    """
    return dot(values, values)


def dot(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the scalar product of 1-D fp32 values, summed like `sum_of_squares`."""
    # Without this call, a dot product in a new thread would use all cores, even after
    # torch.set_num_threads: BLAS keeps the number per thread, and torch.dot does not pass it on.
    # This call passes it on.
    torch.get_num_threads()
    pieces = zip(left.split(STRETCH_ELEMENTS), right.split(STRETCH_ELEMENTS), strict=True)
    return sum(float(torch.dot(one, other)) for one, other in pieces)
