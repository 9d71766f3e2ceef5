"""The int4 codec: 4-bit integers, two per byte, with one 16-bit scale per block of 128."""

from hashlib import blake2b

import torch

from outer.codecs.packing.bits import pack, packed_bytes, unpack
from outer.codecs.packing.block_scales import (
    MIN_SCALE,
    check_scales,
    finite_peaks,
    multiply_blocks,
    num_blocks,
    round_up,
    split_scales,
)
from outer.codecs.packing.checks import check_payload, flat_fp32
from outer.space.buffers import BUFFERS

_BLOCK = 128
_LEVELS = 7
_OFFSET = 8
# Dropping 16 bits of an fp32 leaves a bf16. Steps become wider by 2**-8 on average, and scales take
# 0.125 bits per element, half of what fp32 scales take. The product of a scale and a code is exact.
_DROPPED_BITS = 16
# The largest bf16 for which seven times the scale is finite. With it the largest fp32 is 7.02
# steps, which is still code 7.
_MAX_SCALE = (1 + 18 / 128) * 2.0**125


class Int4Codec:
    """code = round(x / scale), -7 to 7, scale = largest magnitude of the block / 7: |error| <=
    0.5001 scale.

    The scale is a bf16, rounded up by a factor of at most 1 + 2**-7 and at least 2**-108. Zeros
    stay exact, and magnitudes below 1.5e-33 become zero. Payload: the scales (bf16), then the codes
    plus 8.

    With stochastic rounding code = floor(x / scale + noise), so |error| <= 1.0001 scale and the
    expected error is 0. The noise is seeded by the scales, so that equal values give equal bytes.
    """

    name = "int4"
    is_coarse = True
    gathers = False
    block_elements = _BLOCK

    def __init__(self, *, stochastic: bool = False) -> None:
        self._stochastic = stochastic

    def num_bytes(self, num_elements: int) -> int:
        """Return the payload size: half a byte per element, plus 2 bytes per block, which is
        4.125 bits per element.
        """
        return 2 * num_blocks(num_elements, _BLOCK) + packed_bytes(num_elements, 4)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = flat_fp32(values)
        scratch = torch.abs(values, out=BUFFERS.floats(values.numel()))
        peaks = finite_peaks(scratch, _BLOCK, values)
        steps = round_up((peaks / _LEVELS).clamp_(min=MIN_SCALE), _DROPPED_BITS).clamp_(
            max=_MAX_SCALE
        )
        multiply_blocks(values, steps.reciprocal(), _BLOCK, out=scratch)
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        scales, packed = split_scales(payload, peaks.numel())
        scales.copy_(steps)
        if self._stochastic:
            scratch.clamp_(-_LEVELS, _LEVELS).add_(_noise(scales, values.numel())).floor_()
        else:
            scratch.round_()
        # Converting fp32 to int8 is several times faster than converting to uint8.
        codes = scratch.to(torch.int8).add_(_OFFSET).view(torch.uint8)
        pack(codes, 4, out=packed)
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Decode into 1-D fp32 values. Raises MessageError on a wrong size or an impossible
        scale.
        """
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        scales, packed = split_scales(payload, num_blocks(num_elements, _BLOCK))
        scales = check_scales(scales, MIN_SCALE, _MAX_SCALE, self.name)
        # No encoder writes code 0, which would mean -8; it is read as -7.
        codes = (
            unpack(packed, 4, num_elements)
            .clamp_(min=_OFFSET - _LEVELS)
            .view(torch.int8)
            .sub_(_OFFSET)
        )
        values = BUFFERS.floats(num_elements).copy_(codes)
        multiply_blocks(values, scales, _BLOCK, out=values)
        return values


def _noise(scales: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Return `num_elements` fp32 values from 2**-17 to 1 - 2**-17, uniform and symmetric around
    1/2.
    """
    seed = int.from_bytes(
        blake2b(scales.view(torch.uint8).numpy().data, digest_size=8).digest(), "little"
    )
    words = torch.empty(-(-num_elements // 4), dtype=torch.int64)
    # Each random 64-bit word gives four 16-bit values.
    words.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
    draws = words.view(torch.int16)[:num_elements].float()
    # Noise is never 0 or 1, so a value that is (almost) equal to a code keeps that code.
    return draws.mul_(2.0**-16).add_(0.5 + 2.0**-17)
