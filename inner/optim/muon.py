"""Muon and NorMuon on sharded matrices, with the same result on every mesh.

torch.optim.Muon is not used because it orthogonalises shards, whose sums have another order than those of one process,
so that rounding differences grow over the iteration. Measured, its first update on 2 to 4 ranks differs by 3 % from
that of one process. Here, in fp32 on whole matrices, it differs by 1e-5.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from inner.optim.matrix_exchange import build_exchange

# Quintic iteration x <- a x + (b xx' + c (xx')^2) x: steep at 0, it maps singular values to about 0.7 .. 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
ROWS = "row_mean_square"
EPS = 1e-8


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised Nesterov momentum of each matrix, with decoupled weight decay.

    For 2-D parameters only. Updates are scaled to the size of AdamW's, so the same lr and weight decay apply: Muon is
    Scalable for LLM Training (2502.16982), eq. 4. All ranks of the parameters' mesh must call step() together.

    With `row_beta` it is NorMuon (2510.05491), see `normalise_rows`. The mean squares of a matrix's rows, fp32, are
    whole on each rank that holds a shard of it.
    """

    def __init__(
        self,
        params: list[dict],
        lr: float,
        momentum: float,
        dtype: torch.dtype = torch.float32,
        row_beta: float | None = None,
    ) -> None:
        """`dtype`: of the products by which matrices are orthogonalised, see `product_dtype`."""
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "momentum": momentum})
        self.dtype, self.row_beta = dtype, row_beta
        for group in self.param_groups:
            group["params"].sort(key=_kind)
            assert all(param.ndim == 2 for param in group["params"]), "Muon is for matrices"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for batch in _batches(params):
                directions = [self._nesterov_momentum(param, group["momentum"]) for param in batch]
                for param, update in zip(batch, self._find_updates(batch, directions), strict=True):
                    param.mul_(1.0 - group["lr"] * group["weight_decay"])
                    param.add_(update, alpha=-0.2 * math.sqrt(max(param.shape)) * group["lr"])

    def _nesterov_momentum(self, param: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum of the gradient, sharded like the parameter."""
        assert param.grad is not None, "step() leaves out parameters without a gradient"
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        average = state["momentum_buffer"].lerp_(param.grad, 1.0 - momentum)
        return param.grad.lerp(average, momentum)

    def _find_updates(self, batch: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """The orthogonalised directions of a batch, with NorMuon's rows. Sharded like the parameters."""
        if self.row_beta is None:
            return orthogonalise(directions, self.dtype)
        beta, rows = self.row_beta, [self._rows(param) for param in batch]

        def finish(index: int, update: Tensor) -> Tensor:
            even, rows[index] = normalise_rows(update, rows[index], beta)
            return even

        updates = orthogonalise(directions, self.dtype, finish)
        for param, mean_squares in zip(batch, _gather_rows(directions[0], rows), strict=True):
            self.state[param][ROWS] = mean_squares
        return updates

    def _rows(self, param: Tensor) -> Tensor:
        state = self.state[param]
        return state[ROWS] if ROWS in state else torch.zeros(param.shape[0], device=param.device)


def product_dtype(device_type: str, compute_dtype: torch.dtype) -> torch.dtype:
    """The compute dtype on an accelerator, where bf16 is many times as fast; fp32 on a CPU, on every mesh the same."""
    return torch.float32 if device_type == "cpu" else compute_dtype


def _kind(matrix: Tensor) -> tuple[tuple[int, ...], str]:
    """Equal for matrices that are of one shape and sharded alike."""
    return tuple(matrix.shape), str(matrix.placements) if isinstance(matrix, DTensor) else ""


def _batches(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of one kind, as many as there are ranks in their mesh, or fewer. They must be sorted by kind."""
    for _, of_kind in groupby(matrices, _kind):
        members = list(of_kind)
        size = members[0].device_mesh.size() if isinstance(members[0], DTensor) else 1
        yield from (members[first : first + size] for first in range(0, len(members), size))


def _as_it_is(index: int, update: Tensor) -> Tensor:
    """Default of `finish` in `orthogonalise`."""
    return update


def orthogonalise(
    matrices: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    finish: Callable[[int, Tensor], Tensor] = _as_it_is,
) -> list[Tensor]:
    """Orthogonalise matrices of one kind. Of sharded ones each rank of their mesh does one, whole.

    The rank that did a matrix also calls `finish` with its index and what came out, for what the result is to be. The
    results are sharded alike. Every rank of the mesh must call it with the same list.
    """
    first = matrices[0]
    if not isinstance(first, DTensor):
        return [finish(index, newton_schulz(matrix, dtype)) for index, matrix in enumerate(matrices)]
    exchange = build_exchange(first)
    whole = exchange.deal(matrices)
    if exchange.index < len(matrices):
        whole = finish(exchange.index, newton_schulz(whole, dtype))
    return exchange.collect(whole, matrices)


def _gather_rows(first: Tensor, rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """The mean squares of a batch on every rank, where each has those of its matrix. `first`: a matrix of the batch."""
    if not isinstance(first, DTensor):
        return rows
    exchange = build_exchange(first)
    own = rows[exchange.index] if exchange.index < len(rows) else torch.zeros_like(rows[0])
    return exchange.gather(own, len(rows))


def normalise_rows(update_MN: Tensor, before_M: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """NorMuon's update (2510.05491), as long as an orthogonal matrix, and the mean squares of its rows so far.

    v <- beta v + (1 - beta) mean(O^2) by row;  O / (sqrt(v) + eps), scaled to the norm sqrt(min(M, N))
    """
    rows_M = before_M.lerp(update_MN.square().mean(dim=1), 1.0 - beta)
    even_MN = update_MN / (rows_M.sqrt() + EPS)[:, None]
    return even_MN * (math.sqrt(min(even_MN.shape)) / even_MN.norm().clamp(min=EPS)), rows_M


def newton_schulz(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate the nearest matrix with orthonormal rows (or columns, if they are fewer), by products in `dtype`."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = (x / x.norm().clamp(min=1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).contiguous().to(matrix.dtype)
