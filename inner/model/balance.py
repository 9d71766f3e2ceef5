"""What a training step records of its routers: counts of tokens per expert, and the losses that
keep the load even.

The losses are not part of the reported loss. They are added where they arise, so that every
pipeline schedule has their gradients. Both are sums over the tokens of a step, divided by the
number of these tokens, which is counted beforehand like the targets:

    sequence loss (DeepSeek-V3, 2412.19437, eq. 17-20), of each sequence of T tokens, times T:
        sum_i f_i P_i,  f_i = X / (J T) count_i,  P_i = mean over its tokens of s_i / sum_j s_j;  1
                        at balance
    router z-loss (ST-MoE, 2202.08906), of each token:
        log(sum_i exp z_i)^2

Shape suffixes: B sequences, S positions, N = B S, X experts, J experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inner.config import BalanceConfig
from inner.model.kept import is_repetition, keep
from inner.model.router import Routing

SumOverRanks = Callable[[Tensor], Tensor]


def _unchanged(values: Tensor) -> Tensor:
    """Return the sum over a single rank."""
    return values


@dataclass
class LayerRecord:
    """What one layer's router did in a step, on this rank."""

    counts_X: Tensor
    """Number of the step's tokens that chose each expert, int64."""
    dropped: Tensor
    """Number of choices above the capacity, 0-dim int64."""
    sequence_loss: Tensor
    """Sum over sequences of T times the sequence loss, 0-dim fp32; 0 if it has no weight."""
    router_z_loss: Tensor
    """Sum over tokens, 0-dim fp32; 0 if it has no weight."""
    broken: Tensor
    """Number of micro-batches in which the router's logits were not finite, 0-dim int64."""


@dataclass
class RoutedStep:
    """The routers' losses and counts of one training step. All layers of a rank share it."""

    config: BalanceConfig
    scale: Tensor
    """Loss scale / number of the step's tokens over all ranks, 0-dim fp32."""
    sum_over_sequence: SumOverRanks = _unchanged
    """Sums over the ranks that share the positions of a sequence. All of them must call it."""
    layers: dict[int, LayerRecord] = field(default_factory=dict)

    def record(
        self, layer: int, routing: Routing, is_input_BS: Tensor, is_excess_NJ: Tensor | None
    ) -> Tensor | None:
        """Count a micro-batch, and return its losses, scaled (0-dim fp32); None if the config has
        no such losses. A repeated forward counts nothing.

        `is_excess_NJ`: which choices are above the capacity; None: there is none.
        """
        counts_BX = count_tokens(routing, is_input_BS)
        losses = {
            "sequence_loss": torch.zeros_like(self.scale),
            "router_z_loss": torch.zeros_like(self.scale),
        }
        if self.config.sequence_loss:
            losses["sequence_loss"] = sum_sequence_losses(
                routing, is_input_BS, counts_BX, self.sum_over_sequence
            )
        if self.config.router_z_loss:
            losses["router_z_loss"] = sum_z_losses(routing, is_input_BS)
        if not is_repetition():
            counts_X = counts_BX.sum(dim=0)
            dropped = torch.zeros_like(counts_X[0])
            if is_excess_NJ is not None:
                dropped = (is_excess_NJ & is_input_BS.reshape(-1, 1)).sum()
            broken = (~routing.logits_NX.detach().isfinite().all()).long()
            sums = {name: loss.detach() for name, loss in losses.items()}
            self._add(layer, LayerRecord(counts_X, dropped, **sums, broken=broken))
        if not (self.config.sequence_loss or self.config.router_z_loss):
            return None
        weighted = self.config.sequence_loss * losses["sequence_loss"]
        return (weighted + self.config.router_z_loss * losses["router_z_loss"]) * self.scale

    def _add(self, layer: int, new: LayerRecord) -> None:
        before = self.layers.setdefault(layer, new)
        if before is not new:
            before.counts_X += new.counts_X
            before.dropped += new.dropped
            before.sequence_loss += new.sequence_loss
            before.router_z_loss += new.router_z_loss
            before.broken += new.broken


def count_tokens(routing: Routing, is_input_BS: Tensor) -> Tensor:
    """Return the number of each sequence's tokens that chose each expert, int64 (B, X). Padding is
    not counted.
    """
    (B, S) = is_input_BS.shape
    (N, num_choices) = routing.chosen_NJ.shape
    counts_BX = torch.zeros(
        B, routing.scores_NX.shape[1], dtype=torch.int64, device=is_input_BS.device
    )
    is_input_NJ = is_input_BS.reshape(N, 1).expand(-1, num_choices)
    chosen = routing.chosen_NJ.view(B, S * num_choices)
    return counts_BX.scatter_add_(1, chosen, is_input_NJ.reshape(B, -1).long())


def sum_sequence_losses(
    routing: Routing,
    is_input_BS: Tensor,
    counts_BX: Tensor,
    sum_over_sequence: SumOverRanks = _unchanged,
) -> Tensor:
    """Return the sum over sequences of T times the sequence loss, 0-dim fp32. Gradients flow to the
    scores. `counts_BX`: see count_tokens.

    If several ranks share a sequence, each returns the part of its positions, and only counts are
    summed over them: f is a constant for the gradient, and the loss is linear in the scores.
    """
    is_input_N1 = is_input_BS.reshape(-1, 1)
    shares_NX = routing.scores_NX / routing.scores_NX.sum(dim=-1, keepdim=True)
    shares_BX = (shares_NX * is_input_N1).unflatten(0, is_input_BS.shape).sum(dim=1)
    loads_BX = keep(lambda: _find_loads(sum_over_sequence(counts_BX.float())))
    return (loads_BX * shares_BX).sum()


def _find_loads(counts_BX: Tensor) -> Tensor:
    """Return f of each sequence (B, X): its tokens that chose an expert, divided by the mean over
    the experts.
    """
    return counts_BX.shape[1] * counts_BX / counts_BX.sum(dim=1, keepdim=True).clamp(min=1)


def sum_z_losses(routing: Routing, is_input_BS: Tensor) -> Tensor:
    """Return the sum over tokens of the router z-loss, 0-dim fp32."""
    return (routing.logits_NX.logsumexp(dim=-1).square() * is_input_BS.reshape(-1)).sum()


def inject(y: Tensor, loss: Tensor) -> Tensor:
    """Return `y`, in whose backward the gradient of `loss` (0-dim, scaled) is added."""
    carried = _Injection.apply(y, loss)
    assert isinstance(carried, Tensor)
    return carried


class _Injection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], torch.ones((), device=grads[0].device)
