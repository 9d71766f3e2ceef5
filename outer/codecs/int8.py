"""The int8 codec: 8-bit integers, and one scale for each block of 256."""

import math

import torch

from outer.codecs.checks import checked_payload, flat_fp32, non_finite_error
from outer.errors import MessageError

_BLOCK = 256
_LEVELS = 127

# A scale keeps 17 significant bits, so that its product with a code fits fp32's 24: decoding never rounds,
# and encoding what was decoded gives the same bytes again.
_DROPPED_BITS = (1 << 7) - 1
# Small enough to lose nothing that matters, big enough that no denormal survives: a process that flushes
# denormals gives the same bytes as one that does not.
_MIN_SCALE = 2.0**-120
# -128 times this is still finite, so no code that a peer may send decodes to inf.
_MAX_SCALE = (2.0 - 2.0**-16) * 2.0**120


class Int8Codec:
    """code = round(x / scale), scale = largest of the block / 127: |error| <= 0.5001 scale.

    The scale is rounded up by at most 2**-16 of itself and is never below 2**-120, so zeros stay exact and
    magnitudes under 3e-37 vanish. Above 3.37e38 codes saturate instead of overflowing: |error| <= 1.51 scale.
    Payload: the scales (fp32), then the codes.
    """

    name = "int8"
    block_elements = _BLOCK

    def num_bytes(self, num_elements: int) -> int:
        """1 byte an element, 4 for each block begun: 1.6 % more."""
        return 4 * _num_blocks(num_elements) + num_elements

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The payload of `values`. Raises NonFiniteError."""
        values = flat_fp32(values)
        scratch = values.abs()
        peaks = _block_peaks(scratch)
        if peaks.numel() and not math.isfinite(peaks.max().item()):
            raise non_finite_error(values)
        steps = _steps(peaks)
        _multiply_blocks(values, steps.reciprocal(), out=scratch)
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        scales, codes = _split(payload, peaks.numel())
        torch.clamp(steps, max=_MAX_SCALE, out=scales)
        codes.copy_(scratch.round_())
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """1-D fp32 values. Raises MessageError on a wrong size or a scale that no encoder writes."""
        payload = checked_payload(payload, self.num_bytes(num_elements), self.name)
        scales, codes = _split(payload, _num_blocks(num_elements))
        _check_scales(scales)
        values = codes.float()
        _multiply_blocks(values, scales, out=values)
        return values


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // _BLOCK)


def _split(payload: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a payload's scales (fp32) and codes (int8)."""
    return payload[: 4 * num_blocks].view(torch.float32), payload[4 * num_blocks :].view(torch.int8)


def _block_peaks(magnitudes: torch.Tensor) -> torch.Tensor:
    """The largest of each block; inf or nan where the block holds one."""
    peaks = torch.empty(_num_blocks(magnitudes.numel()))
    num_full = magnitudes.numel() // _BLOCK
    torch.amax(magnitudes[: num_full * _BLOCK].view(-1, _BLOCK), dim=1, out=peaks[:num_full])
    if num_full < peaks.numel():
        peaks[num_full] = magnitudes[num_full * _BLOCK :].max()
    return peaks


def _steps(peaks: torch.Tensor) -> torch.Tensor:
    """The distance between two codes of each block, of 17 significant bits, rounded up."""
    steps = (peaks / _LEVELS).clamp_(min=_MIN_SCALE)
    steps.view(torch.int32).add_(_DROPPED_BITS).bitwise_and_(~_DROPPED_BITS)
    return steps


def _multiply_blocks(values: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Write each block of `values` times its factor to `out`, which may be `values`."""
    num_full = values.numel() // _BLOCK
    end = num_full * _BLOCK
    torch.mul(values[:end].view(-1, _BLOCK), factors[:num_full, None], out=out[:end].view(-1, _BLOCK))
    if end < values.numel():
        torch.mul(values[end:], factors[num_full], out=out[end:])


def _check_scales(scales: torch.Tensor) -> None:
    """Raise MessageError unless every scale lies in an encoder's range; nan does not."""
    if scales.numel() == 0:
        return
    low, high = (bound.item() for bound in torch.aminmax(scales))
    if not (low >= _MIN_SCALE and high <= _MAX_SCALE):
        raise MessageError(f"int8 scales between {low} and {high}, allowed {_MIN_SCALE} to {_MAX_SCALE}")
