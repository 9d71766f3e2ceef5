"""A mixture of experts: for each token a router chooses some feed-forwards, and their results are
added up.

    y = sum over the chosen j of g_j down_j(silu(gate_j x) * up_j x) + shared(x)

Rows are sorted by expert, and of one expert by position. Each of the three products is a single
grouped matrix product over all experts. Nothing is dropped, unless the config sets a capacity. A
token's results are added in fp32 in the order of the experts' indices, so that no sum depends on
which rank has computed which expert.

Shape suffixes: B sequences, S positions, N = B S, D dim, X experts, J experts per token, R = N J
rows, F width of an expert.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.model.balance import RoutedStep, inject
from inner.model.capacity import find_excess
from inner.model.feed_forward import FeedForward
from inner.model.kept import keep
from inner.model.router import Router, Routing
from inner.model.sizes import ModelSizes


@dataclass(frozen=True)
class RowOrder:
    """Where each choice of a token is among the rows that are sorted by expert."""

    choice_R: Tensor
    """The choice (position x J + number of the choice) of each row."""
    row_R: Tensor
    """The row of each choice; the inverse of choice_R."""
    ends_X: Tensor
    """Number of rows up to the end of each expert's, int32."""
    per_token: int


class Experts(nn.Module):
    """The routed experts of a block. Each matrix is one tensor over all experts."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        assert sizes.experts is not None, "experts belong to a mixture"
        number = sizes.experts.number
        width = sizes.experts.dim
        self.gate_proj = _Matrices(number, width, sizes.dim)
        self.up_proj = _Matrices(number, width, sizes.dim)
        self.down_proj = _Matrices(number, sizes.dim, width)

    def forward(self, rows_RD: Tensor, ends_X: Tensor) -> Tensor:
        gate_RF = self.gate_proj(rows_RD, ends_X)
        up_RF = self.up_proj(rows_RD, ends_X)
        return self.down_proj(F.silu(gate_RF) * up_RF, ends_X)


class _Matrices(nn.Module):
    """One matrix per expert."""

    def __init__(self, number: int, rows: int, cols: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, rows, cols))

    def forward(self, x: Tensor, ends_X: Tensor) -> Tensor:
        """Multiply the rows of each expert by its matrix."""
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends_X)


class Mixture(nn.Module):
    """The feed-forward of a block with experts."""

    def __init__(self, sizes: ModelSizes, layer: int) -> None:
        super().__init__()
        assert sizes.experts is not None, "the block has experts"
        self.layer = layer
        self.config = sizes.experts
        self.router = Router(sizes)
        self.experts = Experts(sizes)
        shared = sizes.experts.shared * sizes.experts.dim
        self.shared = FeedForward(sizes.dim, shared) if shared else None
        self.step: RoutedStep | None = None
        """Counts, and losses of the router, of the training step in progress; None outside of one."""

    def forward(self, x_BSD: Tensor, is_input_BS: Tensor | None = None) -> Tensor:
        """Return the sum of the experts' results. `is_input_BS`: whether a position is a token and
        not padding; None: all are.
        """
        (B, S, D) = x_BSD.shape
        x_ND = x_BSD.reshape(B * S, D)
        if is_input_BS is None:
            is_input_BS = torch.ones(B, S, dtype=torch.bool, device=x_BSD.device)
        routing = self.router(x_ND)
        is_excess_NJ = self._find_excess(routing, is_input_BS)
        weights_NJ = routing.weights_NJ
        if is_excess_NJ is not None:
            weights_NJ = weights_NJ.masked_fill(is_excess_NJ, 0.0)
        order = sort_by_expert(routing.chosen_NJ, self.config.number)
        rows_RD = self.experts(spread(x_ND, order), order.ends_X)
        y_ND = gather(rows_RD, weights_NJ, order)
        if self.step is not None:
            loss = self.step.record(self.layer, routing, is_input_BS, is_excess_NJ)
            y_ND = y_ND if loss is None else inject(y_ND, loss)
        y_BSD = y_ND.view(B, S, D)
        return y_BSD if self.shared is None else y_BSD + self.shared(x_BSD)

    def _find_excess(self, routing: Routing, is_input_BS: Tensor) -> Tensor | None:
        if self.config.capacity is None:
            return None
        return keep(lambda: find_excess(routing.chosen_NJ, routing.weights_NJ, is_input_BS, self.config))


def mixtures(model_parts: Sequence[nn.Module]) -> list[Mixture]:
    """Return the mixtures of experts of this rank's stages, in the order of the layers."""
    found = [module for model in model_parts for module in model.modules() if isinstance(module, Mixture)]
    return sorted(found, key=lambda mixture: mixture.layer)


@contextmanager
def recording(model_parts: Sequence[nn.Module], step: RoutedStep) -> Iterator[None]:
    """Let the routers record the forwards inside the block as a training step."""
    found = mixtures(model_parts)
    for mixture in found:
        mixture.step = step
    try:
        yield
    finally:
        for mixture in found:
            mixture.step = None


def sort_by_expert(chosen_NJ: Tensor, num_experts: int) -> RowOrder:
    """Return the order of the rows: by expert, and of one expert by position."""
    choices_R = chosen_NJ.flatten()
    choice_R = choices_R.argsort(stable=True)
    row_R = torch.empty_like(choice_R)
    row_R[choice_R] = torch.arange(len(choice_R), device=choice_R.device)
    ends_X = count_choices(choices_R, num_experts).cumsum(0).int()
    return RowOrder(choice_R, row_R, ends_X, chosen_NJ.shape[1])


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
    results_RD = _Permute.apply(rows_RD, order.row_R, order.choice_R)
    assert isinstance(results_RD, Tensor)
    results_NJD = results_RD.view(*weights_NJ.shape, -1)
    return (results_NJD.float() * weights_NJ[..., None]).sum(dim=1).to(rows_RD.dtype)


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
    """Reorders rows. The backward reorders them back, where indexing would add them up."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RD[order_R]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_R,) = ctx.saved_tensors
        return grads[0][inverse_R], None, None
