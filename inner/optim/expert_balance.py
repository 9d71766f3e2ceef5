"""Balance of the experts after a training step: what the routers did on all ranks, and the new
biases.

Auxiliary-loss-free balance (2408.15664, algorithm 1), once per step and layer, with the number of
tokens c of each expert over the whole step and all ranks:

    b <- b + u (sign(mean(c) - c) - its mean over the experts)

The mean is subtracted so that the biases of a layer always add up to 0. Biases are fp32 and the
same on all ranks.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inner.model.balance import RoutedStep
from inner.model.experts import mixtures
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer

OTHER_SUMS = 4
"""Numbers of a layer beside its counts: both losses, dropped choices, and broken micro-batches."""
LARGE_SHARE = 0.5
COLLAPSED_STEPS = 100


@dataclass(frozen=True)
class RoutingResult:
    """What the routers did in a step, over all ranks and the same on each."""

    num_tokens: int
    """Number of tokens that were routed in each layer."""
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
    broken_layers: tuple[int, ...]
    """Layers whose router had logits that are not finite."""

    @property
    def loads(self) -> tuple[float, ...]:
        """For each layer, the tokens of its fullest expert divided by the mean over its experts."""
        return tuple(max(counts) * len(counts) / max(sum(counts), 1) for counts in self.counts)

    @property
    def loads_by_layer(self) -> dict[str, float]:
        """The same by the number of the layer, as text."""
        return {str(layer): load for layer, load in zip(self.layers, self.loads, strict=True)}

    @property
    def figures(self) -> dict[str, float]:
        """Losses that have a weight, and the number of dropped choices."""
        losses = {"sequence_loss": self.sequence_loss, "router_z_loss": self.router_z_loss}
        return {name: loss for name, loss in losses.items() if loss} | {"dropped": self.dropped}


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
            losses = record.sequence_loss, record.router_z_loss
            mine[index, number:] = torch.stack([*losses, record.dropped, record.broken]).double()
    rows = sum_over_ranks(mine).tolist()
    counts = tuple(tuple(int(count) for count in row[:number]) for row in rows)
    per_token = 1.0 / max(num_tokens * len(layers), 1.0)
    sequence_loss = sum(row[number] for row in rows) * per_token
    router_z_loss = sum(row[number + 1] for row in rows) * per_token
    dropped = int(sum(row[number + 2] for row in rows))
    broken = tuple(layer for layer, row in zip(layers, rows, strict=True) if row[number + 3])
    return RoutingResult(round(num_tokens), layers, counts, sequence_loss, router_z_loss, dropped, broken)


class CollapseWatch:
    """Notices layers in which one expert gets most of the tokens for many steps in a row."""

    def __init__(self) -> None:
        self._num_steps: Counter[int] = Counter()

    def observe(self, routing: RoutingResult) -> tuple[int, ...]:
        """Return the layers that have just been collapsed for COLLAPSED_STEPS steps. A layer is
        returned once.
        """
        for layer, counts in zip(routing.layers, routing.counts, strict=True):
            # A token may choose several experts, so the share is of tokens and not of choices.
            is_large = max(counts) > LARGE_SHARE * routing.num_tokens
            self._num_steps[layer] = self._num_steps[layer] + 1 if is_large or self._has_told(layer) else 0
        return tuple(layer for layer in routing.layers if self._num_steps[layer] == COLLAPSED_STEPS)

    def _has_told(self, layer: int) -> bool:
        return self._num_steps[layer] >= COLLAPSED_STEPS


@torch.no_grad()
def move_biases(model_parts: Sequence[Transformer], routing: RoutingResult, speed: float) -> None:
    """Move the biases of this rank's routers by the counts of a step."""
    counts_of = dict(zip(routing.layers, routing.counts, strict=True))
    for mixture in mixtures(model_parts):
        counts_X = torch.tensor(counts_of[mixture.layer], dtype=torch.float64)
        signs_X = (counts_X.mean() - counts_X).sign()
        change_X = speed * (signs_X - signs_X.mean())
        mixture.router.bias += change_X.float().to(mixture.router.bias.device)
