"""Balance of the experts after a training step: what the routers did on all ranks, and the new
biases.

Auxiliary-loss-free balance (2408.15664, algorithm 1), once per step and layer, with the number of
tokens c of each expert over the whole step and all ranks:

    b <- b + u (sign(mean(c) - c) - its mean over the experts)

The mean is subtracted so that the biases of a layer always add up to 0. Biases are fp32 and the
same on all ranks.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from inner.config import BalanceConfig
from inner.config.experts import ROUTER_SUMS
from inner.mesh import IslandMesh
from inner.model.balance import RoutedStep
from inner.model.experts import mixtures, recording
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer

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
    collapsed_layers: tuple[int, ...] = ()
    """Layers in which one expert has got most of the tokens for many steps; each is told once."""

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
            self._num_steps[layer] = (
                self._num_steps[layer] + 1 if is_large or self._has_told(layer) else 0
            )
        return tuple(layer for layer in routing.layers if self._num_steps[layer] == COLLAPSED_STEPS)

    def _has_told(self, layer: int) -> bool:
        return self._num_steps[layer] >= COLLAPSED_STEPS


class ExpertBalance:
    """Records what the routers of an island do in each step, and moves their biases.

    Every rank builds one and makes each call.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        mesh: IslandMesh,
        model_parts: Sequence[Transformer],
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        """Set what is balanced. `sum_over_ranks` sums over all ranks of the island in fp64."""
        assert sizes.experts is not None, "a model without experts has nothing to balance"
        self._num_experts = sizes.experts.number
        self._per_token = sizes.experts.per_token
        self._layers = tuple(sizes.expert_layers)
        self._mesh = mesh
        self._mixtures = mixtures(model_parts)
        self._sum_over_ranks = sum_over_ranks
        self._watch = CollapseWatch()

    @contextmanager
    def recording(
        self, config: BalanceConfig, num_tokens_here: Tensor, loss_scale: float = 1.0
    ) -> Iterator[RoutedStep]:
        """Let the routers record the forwards inside the block, which are those of one step.

        `num_tokens_here`: number of the step's tokens that this rank counts, 0-dim. `loss_scale`:
        the factor of the gradients of all losses.
        """
        num_tokens = self._sum_over_ranks(num_tokens_here)
        scale = (loss_scale / num_tokens.clamp(min=1.0)).float()
        step = RoutedStep(config, scale, self._sum_over_sequence)
        with recording(self._mixtures, step):
            yield step

    def gather(self, step: RoutedStep) -> RoutingResult:
        """Return what all ranks have recorded in a step."""
        number = self._num_experts
        mine = torch.zeros(
            len(self._layers), number + ROUTER_SUMS, dtype=torch.float64, device=step.scale.device
        )
        for index, layer in enumerate(self._layers):
            record = step.layers.get(layer)
            if record is not None:
                mine[index, :number] = record.counts_X
                losses = record.sequence_loss, record.router_z_loss
                mine[index, number:] = torch.stack(
                    [*losses, record.dropped, record.broken]
                ).double()
        rows = self._sum_over_ranks(mine).tolist()
        counts = tuple(tuple(map(int, row[:number])) for row in rows)
        # Each token makes the same number of choices in each layer. Extra depths, which are the
        # last layers, have fewer tokens.
        num_tokens = sum(counts[0]) // self._per_token
        per_token = 1.0 / max(sum(map(sum, counts)) // self._per_token, 1)
        broken = tuple(
            layer for layer, row in zip(self._layers, rows, strict=True) if row[number + 3]
        )
        result = RoutingResult(
            num_tokens=num_tokens,
            layers=self._layers,
            counts=counts,
            sequence_loss=sum(row[number] for row in rows) * per_token,
            router_z_loss=sum(row[number + 1] for row in rows) * per_token,
            dropped=int(sum(row[number + 2] for row in rows)),
            broken_layers=broken,
        )
        return result if broken else replace(result, collapsed_layers=self._watch.observe(result))

    @torch.no_grad()
    def move_biases(self, routing: RoutingResult, speed: float) -> None:
        """Move the biases of this rank's routers by the counts of a step."""
        counts_of = dict(zip(routing.layers, routing.counts, strict=True))
        for mixture in self._mixtures:
            counts_X = torch.tensor(counts_of[mixture.layer], dtype=torch.float64)
            signs_X = (counts_X.mean() - counts_X).sign()
            change_X = speed * (signs_X - signs_X.mean())
            mixture.router.bias += change_X.float().to(mixture.router.bias.device)

    def _sum_over_sequence(self, values: Tensor) -> Tensor:
        """Sum over the ranks that share the positions of a sequence."""
        if self._mesh.degrees.cp > 1:
            dist.all_reduce(values, group=self._mesh.cp_group)
        if self._mesh.degrees.tp > 1:
            dist.all_reduce(values, group=self._mesh.tp.get_group())
        return values
