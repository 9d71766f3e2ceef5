"""Norms, products and distances of parts, summed in fp64: squares of fp32 values cannot overflow there."""

from collections.abc import Sequence

import numpy as np
import torch

CHUNK = 16384
"""Elements widened to fp64 at once."""


def norm(values: torch.Tensor) -> float:
    """The Euclidean norm of a 1-D fp32 tensor."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).item()


def inner_product(left: torch.Tensor, right: torch.Tensor) -> float:
    """The sum of products of two 1-D fp32 tensors of one length."""
    pairs = zip(left.split(CHUNK), right.split(CHUNK), strict=True)
    return sum(torch.dot(a.double(), b.double()).item() for a, b in pairs)


def gram(parts: Sequence[torch.Tensor]) -> np.ndarray:
    """Inner products of all pairs, (n, n) fp64.

    All that a rule asks of points sum_i c_i x_i (their distances from the x_i) follows from it and from c: such a
    rule looks at the parts twice, here and for its result, however many iterations it makes.
    """
    total = np.zeros((len(parts), len(parts)))
    for columns in zip(*(values.split(CHUNK) for values in parts), strict=True):
        # numpy's product sees that both sides are the same matrix, and does half of the work; torch's does not.
        rows = np.stack([values.numpy() for values in columns], dtype=np.float64)
        total += rows @ rows.T
    return total


def distances(products: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """How far each x_i is from sum_i c_i x_i, (n,) fp64; the c_i sum to 1; `products` is the x_i's gram matrix."""
    # |x_i - z|^2 = G_ii - 2 (G c)_i + c G c; rounding may leave a small negative number where it is zero.
    along = products @ coefficients
    squares = products.diagonal() - 2 * along + coefficients @ along
    return np.sqrt(squares.clip(min=0))
