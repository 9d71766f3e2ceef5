"""The e3m0 codec: 4-bit floats (a sign and three exponent bits) with one 16-bit scale per block
of 128.
"""

import torch

from outer.codecs.packing.bits import pack, packed_bytes, unpack
from outer.codecs.packing.block_scales import (
    MIN_SCALE,
    check_scales,
    finite_peaks,
    multiply_blocks,
    num_blocks,
    split_scales,
)
from outer.codecs.packing.checks import check_payload, flat_fp32

_BLOCK = 128
_SIGN = 8
_MAX_SCALE = (2.0 - 2.0**-7) * 2.0**127
_VALUES = torch.tensor(
    [sign * step for sign in (1.0, -1.0) for step in (0.0, *(2.0**e for e in range(-6, 1)))]
)
_MANTISSA_BITS = 23
_HALF = 1 << _MANTISSA_BITS - 1


class E3m0Codec:
    """Nearest of 0 and +-2**-6 to +-2**0 times the block's largest magnitude: |error| <= max(|x| /
    3, scale / 128).

    The 4-bit float of Streaming DiLoCo (2501.18512), which leaves block size, scale and zero open.
    The scale is the bf16 nearest to the largest magnitude, at least 2**-108; so the largest value
    has a relative error of at most 2**-8. Payload: the scales (bf16), then the codes: 8 for minus,
    plus 0 for zero or 7 + exponent.
    """

    name = "e3m0"
    is_coarse = True
    gathers = False
    block_elements = _BLOCK

    def num_bytes(self, num_elements: int) -> int:
        """Return the payload size: half a byte per element, plus 2 bytes per block, which is
        4.125 bits per element.
        """
        return 2 * num_blocks(num_elements, _BLOCK) + packed_bytes(num_elements, 4)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = flat_fp32(values)
        scratch = values.abs()
        peaks = finite_peaks(scratch, _BLOCK, values)
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        scales, packed = split_scales(payload, peaks.numel())
        # Clamped, because the largest fp32 would round up to inf.
        scales.copy_(peaks.clamp_(min=MIN_SCALE, max=_MAX_SCALE))
        # A quarter of the scale is used, because the reciprocal of the largest scale is denormal.
        multiply_blocks(scratch, scales.float().mul_(0.25).reciprocal_(), _BLOCK, out=scratch)
        codes = _magnitude_codes(scratch.view(torch.int32))
        codes.bitwise_or_(
            values.view(torch.int32).bitwise_right_shift(31).to(torch.int8).bitwise_and_(_SIGN)
        )
        pack(codes.view(torch.uint8), 4, out=packed)
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Decode into 1-D fp32 values. Raises MessageError on a wrong size or an impossible
        scale.
        """
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        scales, packed = split_scales(payload, num_blocks(num_elements, _BLOCK))
        scales = check_scales(scales, MIN_SCALE, _MAX_SCALE, self.name)
        values = _VALUES.index_select(0, unpack(packed, 4, num_elements).int())
        multiply_blocks(values, scales, _BLOCK, out=values)
        return values


def _magnitude_codes(bits: torch.Tensor) -> torch.Tensor:
    """Return the int8 codes 0 to 7 of 4 |x| / scale. `bits` holds the fp32 bits of these values
    and is overwritten.
    """
    floor = bits >> _MANTISSA_BITS
    # Adding half a mantissa rounds the exponent to the nearest power of two; 1.5 rounds up to 2.
    nearest = bits.add_(_HALF).bitwise_right_shift_(_MANTISSA_BITS)
    # Code 1 is 2**-6. After the multiplication by 4 its biased exponent is 123.
    codes = nearest.sub_(122).to(torch.int8).clamp_(0, 7)
    # The value below code 1 is zero, so the rounding boundary is at half of code 1, not at three
    # quarters.
    return torch.maximum(codes, floor.sub_(121).to(torch.int8).clamp_(0, 1))
