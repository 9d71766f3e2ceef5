"""Rows of tokens in the order of their experts, and back.

Shape suffixes: N positions of a micro-batch, D dim, X experts, J experts per token, R = N J rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowOrder:
    """Where each choice of a token is among the rows that are sorted by expert."""

    choice_R: Tensor
    """The choice (position x J + number of the choice) of each row."""
    row_R: Tensor
    """The row of each choice; the inverse of choice_R."""
    counts_X: Tensor
    """Number of rows of each expert, int64."""
    per_token: int

    @property
    def ends_X(self) -> Tensor:
        """Number of rows up to the end of each expert's, int32."""
        return self.counts_X.cumsum(0).int()


def sort_by_expert(chosen_NJ: Tensor, num_experts: int) -> RowOrder:
    """Return the order of the rows: by expert, and of one expert by position."""
    choices_R = chosen_NJ.flatten()
    choice_R = choices_R.argsort(stable=True)
    row_R = torch.empty_like(choice_R)
    row_R[choice_R] = torch.arange(len(choice_R), device=choice_R.device)
    return RowOrder(choice_R, row_R, count_choices(choices_R, num_experts), chosen_NJ.shape[1])


def count_choices(choices: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen, int64 (X)."""
    counts_X = torch.zeros(num_experts, dtype=torch.int64, device=choices.device)
    return counts_X.scatter_add_(0, choices, torch.ones_like(choices))


def spread(x_ND: Tensor, order: RowOrder) -> Tensor:
    """Return a copy of each token for each of its experts, sorted by expert (R, D)."""
    rows_RD = _Spread.apply(x_ND, order.choice_R, order.row_R, order.per_token)
    assert isinstance(rows_RD, Tensor)
    return rows_RD


def gather(rows_RD: Tensor, weights_NJ: Tensor, order: RowOrder) -> Tensor:
    """Return the weighted sum of each token's results (N, D), added in fp32 in the order of the
    experts.
    """
    results_RD = permute(rows_RD, order.row_R, order.choice_R)
    results_NJD = results_RD.view(*weights_NJ.shape, -1)
    return (results_NJD.float() * weights_NJ[..., None]).sum(dim=1).to(rows_RD.dtype)


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return `rows[order]`. `inverse` is the inverse of `order`: with it the backward reorders the
    gradients, where that of indexing would add them up.
    """
    permuted = _Permute.apply(rows, order, inverse)
    assert isinstance(permuted, Tensor)
    return permuted


class _Spread(torch.autograd.Function):
    """Copies rows. The gradients of a token's copies are added in fp32 in the order of the
    experts.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, choice_R: Tensor, row_R: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(row_R)
        ctx.per_token = per_token
        return x_ND[choice_R // per_token]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (row_R,) = ctx.saved_tensors
        by_choice_NJD = grads[0][row_R].view(-1, ctx.per_token, grads[0].shape[-1])
        return by_choice_NJD.float().sum(dim=1).to(grads[0].dtype), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None
