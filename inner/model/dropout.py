"""Dropout with one mask on every mesh (1207.0580).

Whether an element is kept follows from (seed, step, layer, place, sequence, position, column)
alone, so each rank computes its own rectangle of one mask, and a backward or a repeated forward
computes it again instead of keeping it. An element is kept if its 16 bits are at least rate x 2^16,
and kept elements are divided by the share that is kept.

Shape suffixes: B sequences of a micro-batch, S positions of the stream on this rank, D dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inner.model.counter_random import GAMMA, draw_16_bits, mix, mix_number, signed

DRAWS = 1 << 16
"""Number of values of the 16 bits that decide about an element."""
ATTENTION = 0
FEED_FORWARD = 1
EMBEDDING = 2
NUM_PLACES = 3


@dataclass(frozen=True)
class Masks:
    """The masks of a micro-batch at one layer."""

    keys_PBS: Tensor
    """Key of each row at each place, int64."""
    rate: float


@dataclass(frozen=True)
class Dropout:
    """The masks of a micro-batch at all layers."""

    keys_BS: Tensor
    """Key of each position of each sequence in a step, int64, on the device."""
    rate: float

    def at(self, layer: int) -> Masks:
        """Return the masks of a layer, by its number in the whole model."""
        first = NUM_PLACES * layer
        places = [self.keys_BS + signed(GAMMA * (first + place + 1)) for place in range(NUM_PLACES)]
        return Masks(mix(torch.stack(places)), self.rate)


@dataclass(frozen=True)
class DropoutSource:
    """Gives the masks of all steps, at the positions of the stream that a rank holds."""

    rate: float
    seed: int
    positions_S: Tensor
    """int64, on the device."""

    def of_micro_batch(self, step: int, sequences: Sequence[int]) -> Dropout:
        """Return the masks of these sequences, by their numbers in the step over all ranks."""
        key = mix_number(mix_number(self.seed) + GAMMA * (step + 1))
        numbers_B = torch.arange(
            sequences[0] + 1, sequences[-1] + 2, device=self.positions_S.device
        )
        keys_B1 = mix(numbers_B * signed(GAMMA) + signed(key))[:, None]
        return Dropout(mix(keys_B1 + (self.positions_S + 1) * signed(GAMMA)), self.rate)


def drop(x_BSD: Tensor, masks: Masks | None, place: int) -> Tensor:
    """Return x with the mask of a place: some elements 0, and the others larger by as much as is
    missing. None: x itself.
    """
    if masks is None:
        return x_BSD
    dropped = _Drop.apply(x_BSD, masks.keys_PBS[place], masks.rate)
    assert isinstance(dropped, Tensor)
    return dropped


def is_kept(keys_BS: Tensor, dim: int, rate: float) -> Tensor:
    """Return which elements of each row are kept, bool (B, S, dim)."""
    return draw_16_bits(keys_BS, 0, dim) >= round(rate * DRAWS) - DRAWS // 2


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, keys_BS: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(keys_BS)
        ctx.rate = rate
        return _masked(x_BSD, keys_BS, rate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keys_BS,) = ctx.saved_tensors
        return _masked(grads[0], keys_BS, ctx.rate), None, None


def _masked(x_BSD: Tensor, keys_BS: Tensor, rate: float) -> Tensor:
    factor = DRAWS / (DRAWS - round(rate * DRAWS))
    return torch.where(is_kept(keys_BS, x_BSD.shape[-1], rate), x_BSD * factor, 0.0)
