"""Codecs that cast each element to a narrower float: fp32 (4 bytes), bf16 and fp16 (2 bytes)."""

import math

import torch

from outer.codecs.packing.checks import (
    check_payload,
    check_values,
    flat_fp32,
    is_finite,
    non_finite_error,
)
from outer.errors import MessageError
from outer.space.buffers import BUFFERS

_FP16_SCALE_BYTES = 4
_FP16_PEAK_EXPONENT = 15
# With this minimum every denormal fp32 gets code 0 and every code decodes to a normal fp32. So
# processes that flush denormals to zero compute the same bits.
_FP16_MIN_SCALE = 2.0**-100
# The largest fp32 with fp16's 11 significant bits; larger values would round up to inf.
_FP16_MAX_VALUE = (2.0 - 2.0**-10) * 2.0**127


class Fp32Codec:
    """Lossless, 4 bytes per element."""

    name = "fp32"
    is_coarse = False
    gathers = False
    block_elements = 1

    def num_bytes(self, num_elements: int) -> int:
        """Return the payload size: 4 bytes per element."""
        return 4 * num_elements

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """View `values` as bytes without a copy: do not change them until the payload is sent."""
        values = flat_fp32(values)
        if not is_finite(values):
            raise non_finite_error(values)
        return values.view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """View the payload as values without a copy. Raises MessageError on a wrong size, inf or
        nan.
        """
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        return check_values(payload.view(torch.float32), self.name)


class Bf16Codec:
    """Nearest bf16, ties to even: |error| <= 2**-8 |x|, or 2**-134 for denormals.

    Values that would round to inf become the largest bf16.
    """

    name = "bf16"
    is_coarse = False
    gathers = False
    block_elements = 1

    def num_bytes(self, num_elements: int) -> int:
        """Return the payload size: 2 bytes per element."""
        return 2 * num_elements

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = flat_fp32(values)
        codes = values.bfloat16()
        if not is_finite(codes):
            if not is_finite(values):
                raise non_finite_error(values)
            # The bit pattern just below that of inf is the largest bf16. A clamp could flush
            # denormals.
            codes.view(torch.int16).sub_(codes.isinf().short())
        return codes.view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Decode into 1-D fp32 values. Raises MessageError on a wrong size, inf or nan."""
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        return check_values(
            BUFFERS.floats(num_elements).copy_(payload.view(torch.bfloat16)), self.name
        )


class Fp16Codec:
    """Nearest fp16 of x / scale, scale a power of two: |error| <= max(2**-11 |x|, 2**-25 scale).

    The scale brings the part's largest magnitude to about 2**15, so that nothing overflows and a
    part of tiny values keeps its precision: scale <= largest / 2**13.99, but at least 2**-100.
    Payload: the scale (fp32), then the codes.
    """

    name = "fp16"
    is_coarse = False
    gathers = False
    block_elements = 1

    def num_bytes(self, num_elements: int) -> int:
        """Return the payload size: 2 bytes per element, plus 4 for the scale."""
        return _FP16_SCALE_BYTES + 2 * num_elements

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = flat_fp32(values)
        peak = _peak(values)
        if peak > _FP16_MAX_VALUE:
            values = values.clamp(-_FP16_MAX_VALUE, _FP16_MAX_VALUE)
            peak = _FP16_MAX_VALUE
        scale = _fp16_scale(peak)
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        payload[:_FP16_SCALE_BYTES].view(torch.float32).fill_(scale)
        payload[_FP16_SCALE_BYTES:].view(torch.float16).copy_(values * (1.0 / scale))
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Decode into 1-D fp32 values. Raises MessageError on a wrong size or scale, and on inf or
        nan.
        """
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        scale = payload[:_FP16_SCALE_BYTES].view(torch.float32).item()
        if math.frexp(scale)[0] != 0.5 or scale < _FP16_MIN_SCALE:
            raise MessageError(
                f"fp16 payload with scale {scale}, not a power of two from {_FP16_MIN_SCALE}"
            )
        return check_values(
            payload[_FP16_SCALE_BYTES:].view(torch.float16).float().mul_(scale), self.name
        )


def _peak(values: torch.Tensor) -> float:
    """Return the largest magnitude, 0.0 for an empty tensor. Raises NonFiniteError."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.aminmax(values)
    peak = max(abs(low.item()), abs(high.item()))
    if not math.isfinite(peak):
        raise non_finite_error(values)
    return peak


def _fp16_scale(peak: float) -> float:
    """Return the scale, a power of two, for a part whose largest magnitude is `peak`."""
    # If fp16's 11 bits round a peak up to the next power of two, it counts as that power, so that
    # decoded values encode with the same scale again. A peak of 0 has no exponent, and denormals
    # may be read as 0, so both count as the minimum.
    exponent = math.frexp(max(peak, _FP16_MIN_SCALE) / (1.0 - 2.0**-12))[1]
    return max(2.0 ** (exponent - _FP16_PEAK_EXPONENT), _FP16_MIN_SCALE)
