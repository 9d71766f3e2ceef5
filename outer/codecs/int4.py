"""The int4 codec: 4-bit integers, two a byte, and one 16-bit scale for each block of 128."""

from hashlib import blake2b

import torch

from outer.codecs.blocks import (
    MIN_SCALE,
    checked_scales,
    finite_peaks,
    multiply_blocks,
    num_blocks,
    round_up,
    split_scales,
)
from outer.codecs.checks import checked_payload, flat_fp32
from outer.codecs.packing import pack, packed_bytes, unpack

_BLOCK = 128
_LEVELS = 7
_OFFSET = 8
# What is left is a bf16: steps are wider by 2**-8 of themselves on average, and the wire carries 0.125 bits an
# element, half of what fp32 scales take. The product with a code is exact.
_DROPPED_BITS = 16
# The largest bf16 that is finite seven times over. With it the largest fp32 is 7.02 steps, still code 7.
_MAX_SCALE = (1 + 18 / 128) * 2.0**125


class Int4Codec:
    """code = round(x / scale), -7 to 7, scale = largest of the block / 7: |error| <= 0.5001 scale.

    The scale is a bf16, rounded up by at most 2**-7 of itself and never below 2**-108, so zeros stay exact and
    magnitudes under 1.5e-33 vanish. Payload: the scales (bf16), then the codes plus 8.

    Stochastic: code = floor(x / scale + noise), so |error| <= 1.0001 scale and the expected error is 0. The noise
    follows from the scales alone: equal values give equal bytes.
    """

    name = "int4"
    block_elements = _BLOCK

    def __init__(self, *, stochastic: bool = False) -> None:
        self._stochastic = stochastic

    def num_bytes(self, num_elements: int) -> int:
        """Half a byte an element, 2 for each block begun: 4.125 bits an element."""
        return 2 * num_blocks(num_elements, _BLOCK) + packed_bytes(num_elements, 4)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The payload of `values`. Raises NonFiniteError."""
        values = flat_fp32(values)
        scratch = values.abs()
        peaks = finite_peaks(scratch, _BLOCK, values)
        steps = round_up((peaks / _LEVELS).clamp_(min=MIN_SCALE), _DROPPED_BITS).clamp_(max=_MAX_SCALE)
        multiply_blocks(values, steps.reciprocal(), _BLOCK, out=scratch)
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        scales, packed = split_scales(payload, peaks.numel())
        scales.copy_(steps)
        if self._stochastic:
            scratch.clamp_(-_LEVELS, _LEVELS).add_(_noise(scales, values.numel())).floor_()
        else:
            scratch.round_()
        # fp32 to int8 is several times faster than to uint8.
        codes = scratch.to(torch.int8).add_(_OFFSET).view(torch.uint8)
        pack(codes, 4, out=packed)
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """1-D fp32 values. Raises MessageError on a wrong size or a scale that no encoder writes."""
        payload = checked_payload(payload, self.num_bytes(num_elements), self.name)
        scales, packed = split_scales(payload, num_blocks(num_elements, _BLOCK))
        scales = checked_scales(scales, MIN_SCALE, _MAX_SCALE, self.name)
        # Code 0, which would be -8, is nothing that an encoder writes; it counts as -7.
        codes = unpack(packed, 4, num_elements).clamp_(min=_OFFSET - _LEVELS).view(torch.int8).sub_(_OFFSET)
        values = codes.float()
        multiply_blocks(values, scales, _BLOCK, out=values)
        return values


def _noise(scales: torch.Tensor, num_elements: int) -> torch.Tensor:
    """`num_elements` of fp32 from 2**-17 to 1 - 2**-17, evenly spread around 1/2."""
    seed = int.from_bytes(blake2b(scales.view(torch.uint8).numpy().data, digest_size=8).digest(), "little")
    words = torch.empty(-(-num_elements // 4), dtype=torch.int64)
    # All 64 bits of each: four draws for the price of one.
    words.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
    draws = words.view(torch.int16)[:num_elements].float()
    # Not 0 and not 1: a value that is a code already, or all but zero, stays as it is.
    return draws.mul_(2.0**-16).add_(0.5 + 2.0**-17)
