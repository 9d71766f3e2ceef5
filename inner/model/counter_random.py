"""Random bits that follow from a key and a number, equal on every device and every mesh.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) is counter-based: its n-th number for a key is
mix(key + n G). All arithmetic is modulo 2^64, on int64 tensors.
"""

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHIFTS = 30, 27, 31
WORD = 1 << 64
DRAWS_PER_NUMBER = 4


def mix(values: Tensor) -> Tensor:
    """Return SplitMix64's mixture of each value, int64."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        values = (values ^ _shifted(values, shift)) * signed(multiplier)
    return values ^ _shifted(values, SHIFTS[-1])


def mix_number(number: int) -> int:
    """Return `mix` of a number. A dry run, whose tensors have no values, needs it without
    tensors.
    """
    number %= WORD
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        number = (number ^ number >> shift) * multiplier % WORD
    return number ^ number >> SHIFTS[-1]


def draw_16_bits(keys: Tensor, first: int, count: int) -> Tensor:
    """Return the draws `first` to `first + count` of each key, int16 (..., count). Four draws share
    a number.
    """
    begin = first // DRAWS_PER_NUMBER
    end = -(-(first + count) // DRAWS_PER_NUMBER)
    counters = torch.arange(begin + 1, end + 1, device=keys.device) * signed(GAMMA)
    draws = mix(keys[..., None] + counters).view(torch.int16)
    skipped = first - DRAWS_PER_NUMBER * begin
    return draws[..., skipped : skipped + count]


def signed(number: int) -> int:
    """Return the int64 with the bits of a number modulo 2^64."""
    low = number % WORD
    return low - WORD if low >= WORD // 2 else low


def _shifted(values: Tensor, shift: int) -> Tensor:
    """Shift to the right and fill with zeros; torch fills with the sign."""
    return (values >> shift) & ((1 << (64 - shift)) - 1)
