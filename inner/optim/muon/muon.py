"""Muon and NorMuon on sharded matrices, with the same result on every mesh.

torch.optim.Muon is not used, because it orthogonalises shards. Their sums are added in another
order than in one process, and the rounding differences grow over the iteration: its first update on
2 to 4 ranks was measured to differ by 3 % from one process. Here, with fp32 and whole matrices, the
difference is 1e-5.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from inner.optim.muon.matrix_exchange import build_row_exchange
from inner.optim.muon.orthogonalise import gather_rows, newton_schulz, normalise_rows, orthogonalise
from inner.params import local_tensor

ROWS = "row_mean_square"


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised Nesterov momentum of each matrix, with decoupled weight decay.

    For matrices, and for the tensor of all experts of a layer, in which each expert's matrix is
    stepped by itself. Updates are scaled to the size of AdamW's updates, so that the same lr
    and weight decay apply: Muon is Scalable for LLM Training (2502.16982), eq. 4. All ranks of the
    parameters' mesh must call step() together.

    With `row_beta` it is NorMuon (2510.05491), see `normalise_rows`. Each rank that holds a shard
    of a matrix keeps the mean squares of all its rows, in fp32.
    """

    def __init__(
        self,
        params: list[dict],
        lr: float,
        momentum: float,
        dtype: torch.dtype = torch.float32,
        row_beta: float | None = None,
    ) -> None:
        """Set the options. `dtype`: dtype of the products that orthogonalise matrices, see
        `product_dtype`.
        """
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "momentum": momentum})
        self.dtype = dtype
        self.row_beta = row_beta
        for group in self.param_groups:
            group["params"].sort(key=_kind)
            assert all(param.ndim in (2, 3) for param in group["params"]), "Muon is for matrices"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for batch in _batches([param for param in params if param.ndim == 2]):
                directions = [self._nesterov_momentum(param, group["momentum"]) for param in batch]
                for param, update in zip(batch, self._find_updates(batch, directions), strict=True):
                    param.mul_(1.0 - group["lr"] * group["weight_decay"])
                    param.add_(update, alpha=-0.2 * math.sqrt(max(param.shape)) * group["lr"])
            for stack in params:
                if stack.ndim == 3:
                    self._step_experts(stack, group)

    def _step_experts(self, stack: Tensor, group: dict[str, Any]) -> None:
        """Step the matrices of the experts that this rank holds, each by itself."""
        directions = local_tensor(self._nesterov_momentum(stack, group["momentum"])).unbind()
        rows = None if self.row_beta is None else local_tensor(self._rows_of_experts(stack))
        is_cut = local_tensor(stack).shape[1] < stack.shape[1]
        if isinstance(stack, DTensor) and is_cut:
            updates = self._updates_of_cut(stack, directions, rows)
        else:
            updates = [
                self._finish(
                    newton_schulz(direction, self.dtype), None if rows is None else rows[number]
                )
                for number, direction in enumerate(directions)
            ]
        size = 0.2 * math.sqrt(max(stack.shape[1:]))
        for matrix, update in zip(local_tensor(stack), updates, strict=True):
            matrix.mul_(1.0 - group["lr"] * group["weight_decay"])
            matrix.add_(update, alpha=-size * group["lr"])

    def _updates_of_cut(
        self, stack: DTensor, directions: Sequence[Tensor], rows: Tensor | None
    ) -> list[Tensor]:
        """Return the updates of experts of which each rank holds some rows. Each rank
        orthogonalises some of them whole. All ranks with rows of the same experts must call it.
        """
        exchange = build_row_exchange(stack, stack.shape[2])
        of_rows = build_row_exchange(stack, 1)
        updates: list[Tensor] = []
        for first in range(0, len(directions), exchange.num_ranks):
            batch = directions[first : first + exchange.num_ranks]
            whole = exchange.deal(batch)
            kept = (
                None
                if rows is None
                else [each[:, None] for each in rows[first : first + len(batch)]]
            )
            squares = None if kept is None else of_rows.deal(kept)[:, 0].contiguous()
            if exchange.index < len(batch):
                whole = self._finish(newton_schulz(whole, self.dtype), squares)
            updates += exchange.collect(whole, batch)
            if kept is not None and squares is not None:
                for old, new in zip(kept, of_rows.collect(squares[:, None], kept), strict=True):
                    old.copy_(new)
        return updates

    def _finish(self, update: Tensor, rows: Tensor | None) -> Tensor:
        """Normalise an update by rows if this is NorMuon, and move the mean squares `rows` in
        place.
        """
        if rows is None or self.row_beta is None:
            return update
        even, squares = normalise_rows(update, rows, self.row_beta)
        rows.copy_(squares)
        return even

    def _rows_of_experts(self, stack: Tensor) -> Tensor:
        """Return NorMuon's mean squares of all rows (experts, rows), sharded like the experts."""
        state = self.state[stack]
        if ROWS not in state:
            state[ROWS] = rows_of_stack(stack)
        return state[ROWS]

    def _nesterov_momentum(self, param: Tensor, momentum: float) -> Tensor:
        """Return the Nesterov momentum of the gradient, sharded like the parameter."""
        assert param.grad is not None, "step() must leave out parameters without a gradient"
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        average = state["momentum_buffer"].lerp_(param.grad, 1.0 - momentum)
        return param.grad.lerp(average, momentum)

    def _find_updates(self, batch: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """Return the orthogonalised directions of a batch, normalised by rows if it is NorMuon,
        sharded like the parameters.
        """
        if self.row_beta is None:
            return orthogonalise(directions, self.dtype)
        beta = self.row_beta
        rows = [self._rows(param) for param in batch]

        def finish(index: int, update: Tensor) -> Tensor:
            even, rows[index] = normalise_rows(update, rows[index], beta)
            return even

        updates = orthogonalise(directions, self.dtype, finish)
        for param, mean_squares in zip(batch, gather_rows(directions[0], rows), strict=True):
            self.state[param][ROWS] = mean_squares
        return updates

    def _rows(self, param: Tensor) -> Tensor:
        state = self.state[param]
        return state[ROWS] if ROWS in state else torch.zeros(param.shape[0], device=param.device)


def rows_of_stack(stack: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros for each row of each expert (experts, rows), sharded like the tensor of all
    experts.
    """
    local = local_tensor(stack)
    zeros = torch.zeros(local.shape[:2], dtype=dtype, device=local.device)
    if not isinstance(stack, DTensor):
        return zeros
    shape = stack.shape[:2]
    return DTensor.from_local(
        zeros,
        stack.device_mesh,
        stack.placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )


def _kind(matrix: Tensor) -> tuple[tuple[int, ...], str]:
    """Return a key that is equal for matrices with the same shape and sharding."""
    return tuple(matrix.shape), str(matrix.placements) if isinstance(matrix, DTensor) else ""


def _batches(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield batches of matrices of one kind, at most one matrix per rank of their mesh. They must
    be sorted by kind.
    """
    for _, of_kind in groupby(matrices, _kind):
        members = list(of_kind)
        size = members[0].device_mesh.size() if isinstance(members[0], DTensor) else 1
        yield from (members[first : first + size] for first in range(0, len(members), size))
