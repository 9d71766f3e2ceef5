"""Balance of the experts after a training step: what the routers did on all ranks, and the new
biases.

Auxiliary-loss-free balance (2408.15664, algorithm 1), once per step and layer, with the number of
tokens c of each expert over the whole step and all ranks:

    b <- b + u (sign(mean(c) - c) - its mean over the experts)

The mean is subtracted so that the biases of a layer always add up to 0. Biases are fp32 and the
same on all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inner.model.balance import RoutedStep
from inner.model.experts import mixtures
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer

OTHER_SUMS = 3
"""Numbers of a layer beside its counts: both losses, and dropped choices."""


@dataclass(frozen=True)
class RoutingResult:
    """What the routers did in a step, over all ranks and the same on each."""

    layers: tuple[int, ...]
    """Numbers of the layers with experts. The other lists follow this order."""
    counts: tuple[tuple[int, ...], ...]
    """Number of tokens that chose each expert."""
    sequence_loss: float
    """Mean over tokens and layers; 1 if every sequence uses its experts equally."""
    router_z_loss: float
    """Mean over tokens and layers."""
    dropped: int
    """Number of choices above the capacity."""

    @property
    def loads(self) -> tuple[float, ...]:
        """For each layer, the tokens of its fullest expert divided by the mean over its experts."""
        return tuple(max(counts) * len(counts) / max(sum(counts), 1) for counts in self.counts)


def gather_routing(
    sizes: ModelSizes, step: RoutedStep, sum_over_ranks: Callable[[Tensor], Tensor], num_tokens: float
) -> RoutingResult:
    """Return what all ranks have recorded in a step of `num_tokens` tokens. Every rank must call it."""
    assert sizes.experts is not None, "a model without experts routes nothing"
    number = sizes.experts.number
    layers = tuple(sizes.expert_layers)
    mine = torch.zeros(len(layers), number + OTHER_SUMS, dtype=torch.float64, device=step.scale.device)
    for index, layer in enumerate(layers):
        record = step.layers.get(layer)
        if record is not None:
            mine[index, :number] = record.counts_X
            mine[index, number:] = torch.stack([record.sequence_loss, record.router_z_loss, record.dropped.float()])
    rows = sum_over_ranks(mine).tolist()
    counts = tuple(tuple(int(count) for count in row[:number]) for row in rows)
    per_token = 1.0 / max(num_tokens * len(layers), 1.0)
    sequence_loss = sum(row[number] for row in rows) * per_token
    router_z_loss = sum(row[number + 1] for row in rows) * per_token
    return RoutingResult(layers, counts, sequence_loss, router_z_loss, int(sum(row[number + 2] for row in rows)))


@torch.no_grad()
def move_biases(model_parts: Sequence[Transformer], routing: RoutingResult, speed: float) -> None:
    """Move the biases of this rank's routers by the counts of a step."""
    counts_of = dict(zip(routing.layers, routing.counts, strict=True))
    for mixture in mixtures(model_parts):
        counts_X = torch.tensor(counts_of[mixture.layer], dtype=torch.float64)
        signs_X = (counts_X.mean() - counts_X).sign()
        change_X = speed * (signs_X - signs_X.mean())
        mixture.router.bias += change_X.float().to(mixture.router.bias.device)
