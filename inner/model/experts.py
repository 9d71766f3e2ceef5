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
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.model.balance import RoutedStep, inject
from inner.model.capacity import find_excess
from inner.model.expert_rows import RowOrder, gather, sort_by_expert, spread
from inner.model.feed_forward import FeedForward
from inner.model.kept import keep
from inner.model.local_part import local_part
from inner.model.router import Router, Routing
from inner.model.sizes import ModelSizes


class Exchange(Protocol):
    """Brings rows to the experts that are on other ranks, and their results back."""

    def plan(self, counts_X: Tensor) -> Any:
        """Return how rows travel, given the number of rows for each expert."""
        ...

    def dispatch(self, rows_RD: Tensor, route: Any) -> Tensor:
        """Return the rows for this rank's experts, sorted by expert."""
        ...

    def combine(self, results_AD: Tensor, route: Any) -> Tensor:
        """Return the results of the rows that this rank dispatched, in their order."""
        ...


class Share(Protocol):
    """Divides the positions of a micro-batch among ranks that hold the same stream."""

    def take(self, x_BSD: Tensor, is_input_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's positions of the stream, and which of them are tokens."""
        ...

    def give(self, y_BSD: Tensor) -> Tensor:
        """Return the stream from the results at this rank's positions."""
        ...


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
        weight = local_part(self.weight)
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends_X)


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
        self.exchange: Exchange | None = None
        """How rows reach experts on other ranks; None: all experts are on this rank."""
        self.share: Share | None = None
        """The positions that this rank routes, if ranks of tp have the same; None: all
        positions.
        """
        self.step: RoutedStep | None = None
        """Counts, and losses of the router, of the training step in progress; None outside of
        one.
        """

    def forward(self, x_BSD: Tensor, is_input_BS: Tensor | None = None) -> Tensor:
        """Return the sum of the experts' results. `is_input_BS`: whether a position is a token and
        not padding; None: all are.
        """
        if is_input_BS is None:
            is_input_BS = torch.ones(x_BSD.shape[:2], dtype=torch.bool, device=x_BSD.device)
        if self.share is None:
            y_BSD = self._route(x_BSD, is_input_BS)
        else:
            y_BSD = self.share.give(self._route(*self.share.take(x_BSD, is_input_BS)))
        return y_BSD if self.shared is None else y_BSD + self.shared(x_BSD)

    def _route(self, x_BSD: Tensor, is_input_BS: Tensor) -> Tensor:
        """Return the sum of the results of each position's routed experts."""
        x_ND = x_BSD.flatten(0, 1)
        routing = self.router(x_ND)
        is_excess_NJ = self._find_excess(routing, is_input_BS)
        weights_NJ = routing.weights_NJ
        if is_excess_NJ is not None:
            weights_NJ = weights_NJ.masked_fill(is_excess_NJ, 0.0)
        order = sort_by_expert(routing.chosen_NJ, self.config.number)
        y_ND = gather(self._compute(spread(x_ND, order), order), weights_NJ, order)
        if self.step is not None:
            loss = self.step.record(self.layer, routing, is_input_BS, is_excess_NJ)
            y_ND = y_ND if loss is None else inject(y_ND, loss)
        return y_ND.view(x_BSD.shape)

    def _compute(self, rows_RD: Tensor, order: RowOrder) -> Tensor:
        """Return the result of each row's expert."""
        if self.exchange is None:
            return self.experts(rows_RD, order.ends_X)
        route = self.exchange.plan(order.counts_X)
        results_AD = self.experts(self.exchange.dispatch(rows_RD, route), route.ends_L)
        return self.exchange.combine(results_AD, route)

    def _find_excess(self, routing: Routing, is_input_BS: Tensor) -> Tensor | None:
        if self.config.capacity is None:
            return None
        return keep(
            lambda: find_excess(routing.chosen_NJ, routing.weights_NJ, is_input_BS, self.config)
        )


def mixtures(model_parts: Sequence[nn.Module]) -> list[Mixture]:
    """Return the mixtures of experts of this rank's stages, in the order of the layers."""
    found = [
        module for model in model_parts for module in model.modules() if isinstance(module, Mixture)
    ]
    return sorted(found, key=lambda mixture: mixture.layer)


@contextmanager
def recording(found: Sequence[Mixture], step: RoutedStep) -> Iterator[None]:
    """Let the routers of these mixtures record the forwards inside the block as a training step."""
    for mixture in found:
        mixture.step = step
    try:
        yield
    finally:
        for mixture in found:
            mixture.step = None
