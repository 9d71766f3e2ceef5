"""The e3m0 codec: 4-bit floats of a sign and three bits of exponent, and one 16-bit scale for each block of 128."""

import torch

from outer.codecs.blocks import MIN_SCALE, checked_scales, finite_peaks, multiply_blocks, num_blocks, split_scales
from outer.codecs.checks import checked_payload, flat_fp32
from outer.codecs.packing import pack, packed_bytes, unpack

_BLOCK = 128
_SIGN = 8
_MAX_SCALE = (2.0 - 2.0**-7) * 2.0**127
_VALUES = torch.tensor([sign * step for sign in (1.0, -1.0) for step in (0.0, *(2.0**e for e in range(-6, 1)))])
_MANTISSA_BITS = 23
_HALF = 1 << _MANTISSA_BITS - 1


class E3m0Codec:
    """The nearest of 0 and +-2**-6 to +-2**0 times the block's largest: |error| <= max(|x| / 3, scale / 128).

    The 4-bit float of Streaming DiLoCo (2501.18512), which leaves block, scale and zero open. The scale is the
    nearest bf16 to the largest magnitude, so the largest itself is off by 2**-8 of itself at most; never below
    2**-108. Payload: the scales (bf16), then the codes: 8 for minus, 0 for zero or 7 + exponent.
    """

    name = "e3m0"
    block_elements = _BLOCK

    def num_bytes(self, num_elements: int) -> int:
        """Half a byte an element, 2 for each block begun: 4.125 bits an element."""
        return 2 * num_blocks(num_elements, _BLOCK) + packed_bytes(num_elements, 4)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The payload of `values`. Raises NonFiniteError."""
        values = flat_fp32(values)
        scratch = values.abs()
        peaks = finite_peaks(scratch, _BLOCK, values)
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        scales, packed = split_scales(payload, peaks.numel())
        # The largest fp32 would round up to inf.
        scales.copy_(peaks.clamp_(min=MIN_SCALE, max=_MAX_SCALE))
        # A quarter of the scale: of the largest the reciprocal is denormal.
        multiply_blocks(scratch, scales.float().mul_(0.25).reciprocal_(), _BLOCK, out=scratch)
        codes = _magnitude_codes(scratch.view(torch.int32))
        codes.bitwise_or_(values.view(torch.int32).bitwise_right_shift(31).to(torch.int8).bitwise_and_(_SIGN))
        pack(codes.view(torch.uint8), 4, out=packed)
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """1-D fp32 values. Raises MessageError on a wrong size or a scale that no encoder writes."""
        payload = checked_payload(payload, self.num_bytes(num_elements), self.name)
        scales, packed = split_scales(payload, num_blocks(num_elements, _BLOCK))
        scales = checked_scales(scales, MIN_SCALE, _MAX_SCALE, self.name)
        values = _VALUES.index_select(0, unpack(packed, 4, num_elements).int())
        multiply_blocks(values, scales, _BLOCK, out=values)
        return values


def _magnitude_codes(bits: torch.Tensor) -> torch.Tensor:
    """int8 codes 0 to 7 of 4 |x| / scale, given as fp32's bits, which are lost."""
    floor = bits >> _MANTISSA_BITS
    # Half of a mantissa more, and the exponent is that of the nearest power of two: 1.5 goes up to 2.
    nearest = bits.add_(_HALF).bitwise_right_shift_(_MANTISSA_BITS)
    # 2**-6 is code 1; its biased exponent, times 4, is 123.
    codes = nearest.sub_(122).to(torch.int8).clamp_(0, 7)
    # Below it is zero, so half of it is the border, not three quarters.
    return torch.maximum(codes, floor.sub_(121).to(torch.int8).clamp_(0, 1))
