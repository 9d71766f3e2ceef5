"""The int8 codec: 8-bit integers with one scale per block of 256."""

import torch

from outer.codecs.packing.block_scales import (
    check_scales,
    finite_peaks,
    multiply_blocks,
    num_blocks,
    round_up,
)
from outer.codecs.packing.checks import check_payload, flat_fp32

_BLOCK = 256
_LEVELS = 127

# A scale keeps 17 significant bits, so that its product with a code fits into fp32's 24. Decoding
# therefore never rounds, and encoding decoded values gives the same bytes again.
_DROPPED_BITS = 7
# Small enough to lose no relevant precision, and large enough to turn every denormal into zero, so
# that processes that flush denormals give the same bytes.
_MIN_SCALE = 2.0**-120
# The product of this scale and -128 is finite, so no code from a peer decodes to inf.
_MAX_SCALE = (2.0 - 2.0**-16) * 2.0**120


class Int8Codec:
    """code = round(x / scale), scale = largest magnitude of the block / 127: |error| <= 0.5001
    scale.

    The scale is rounded up by a factor of at most 1 + 2**-16 and is at least 2**-120. Zeros stay
    exact, and magnitudes below 3e-37 become zero. Above 3.37e38 codes saturate instead of
    overflowing: |error| <= 1.51 scale. Payload: the scales (fp32), then the codes.
    """

    name = "int8"
    is_coarse = False
    gathers = False
    block_elements = _BLOCK

    def num_bytes(self, num_elements: int) -> int:
        """Return the payload size: 1 byte per element, plus 4 bytes per block, which adds 1.6 %."""
        return 4 * num_blocks(num_elements, _BLOCK) + num_elements

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = flat_fp32(values)
        scratch = values.abs()
        peaks = finite_peaks(scratch, _BLOCK, values)
        steps = round_up((peaks / _LEVELS).clamp_(min=_MIN_SCALE), _DROPPED_BITS)
        multiply_blocks(values, steps.reciprocal(), _BLOCK, out=scratch)
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        scales, codes = _split(payload, peaks.numel())
        torch.clamp(steps, max=_MAX_SCALE, out=scales)
        codes.copy_(scratch.round_())
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Decode into 1-D fp32 values. Raises MessageError on a wrong size or an impossible
        scale.
        """
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        scales, codes = _split(payload, num_blocks(num_elements, _BLOCK))
        scales = check_scales(scales, _MIN_SCALE, _MAX_SCALE, self.name)
        values = codes.float()
        multiply_blocks(values, scales, _BLOCK, out=values)
        return values


def _split(payload: torch.Tensor, num_scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a payload's scales (fp32) and codes (int8)."""
    return payload[: 4 * num_scales].view(torch.float32), payload[4 * num_scales :].view(torch.int8)
