"""Orthogonalise matrices, each on one of the ranks that hold a shard of it, and normalise rows for
NorMuon.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from inner.optim.muon.matrix_exchange import build_exchange

# Quintic iteration x <- a x + (b xx' + c (xx')^2) x: it is steep at 0 and maps singular values to
# about 0.7 .. 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-8


def product_dtype(device_type: str, compute_dtype: torch.dtype) -> torch.dtype:
    """Return bf16 on an accelerator that computes in it, where it is several times as fast; on a
    CPU always fp32. The iterations are not made for the range of float16.
    """
    is_fast = device_type != "cpu" and compute_dtype == torch.bfloat16
    return torch.bfloat16 if is_fast else torch.float32


def _as_it_is(index: int, update: Tensor) -> Tensor:
    """Return the update unchanged. This is the default of `finish` in `orthogonalise`."""
    return update


def orthogonalise(
    matrices: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    finish: Callable[[int, Tensor], Tensor] = _as_it_is,
) -> list[Tensor]:
    """Orthogonalise matrices of one kind. If they are sharded, each rank of their mesh
    orthogonalises one whole matrix.

    The rank with a matrix also calls `finish` with its index and the orthogonalised matrix; the
    return value is the result. Results are sharded like the matrices. Every rank of the mesh must
    call it with the same list.
    """
    first = matrices[0]
    if not isinstance(first, DTensor):
        return [
            finish(index, newton_schulz(matrix, dtype)) for index, matrix in enumerate(matrices)
        ]
    exchange = build_exchange(first)
    whole = exchange.deal(matrices)
    if exchange.index < len(matrices):
        whole = finish(exchange.index, newton_schulz(whole, dtype))
    return exchange.collect(whole, matrices)


def gather_rows(first: Tensor, rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the mean squares of all matrices of a batch, although each rank has computed only
    those of its own matrix. `first`: a matrix of the batch. Every rank of its mesh must call it.
    """
    if not isinstance(first, DTensor):
        return rows
    exchange = build_exchange(first)
    own = rows[exchange.index] if exchange.index < len(rows) else torch.zeros_like(rows[0])
    return exchange.gather(own, len(rows))


def normalise_rows(update_MN: Tensor, before_M: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return NorMuon's update (2510.05491), scaled to the norm of an orthogonal matrix, and the new
    mean squares of its rows.

    v <- beta v + (1 - beta) mean(O^2) by row;  O / (sqrt(v) + eps), scaled to the norm sqrt(min(M,
    N))
    """
    rows_M = before_M.lerp(update_MN.square().mean(dim=1), 1.0 - beta)
    even_MN = update_MN / (rows_M.sqrt() + EPS)[:, None]
    return even_MN * (math.sqrt(min(even_MN.shape)) / even_MN.norm().clamp(min=EPS)), rows_M


def newton_schulz(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate the nearest matrix with orthonormal rows (or columns, if they are fewer), by
    products in `dtype`.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = (x / x.norm().clamp(min=1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).contiguous().to(matrix.dtype)
