"""How the values that topk picks are coded, at 2, 8 or 32 bits; `group` picked values make a chunk.

2: sign and one bit of size, below the chunk's mean magnitude or not; decodes to the mean magnitude of the chunk's
   values of that size, so the sum of magnitudes survives but for the rounding of a bf16. 4 bytes more for a chunk.
8: an integer from -127 to 127 times the chunk's scale, the largest magnitude / 127 rounded up to a bf16:
   |error| <= 0.5001 scale. 2 bytes more for a chunk.
32: the fp32 itself.

At 2 and 8 bits magnitudes below 2**-108 are 0, and 3.39e38 is the largest: bf16 has no more.
"""

import torch

from outer.codecs.blocks import MIN_SCALE, block_peaks, checked_scales, multiply_blocks, num_blocks, round_up
from outer.codecs.checks import checked_values
from outer.codecs.packing import pack, packed_bytes, unpack

_HEADER_BYTES = {2: 4, 8: 2, 32: 0}
_MAX_BF16 = (2.0 - 2.0**-7) * 2.0**127
_NEGATIVE = 2
_LEVELS = 127
# The largest bf16 that is finite 127 times over. With it the largest fp32 is 127.01 steps, still code 127.
_MAX_SCALE = (1 + 2.0**-7) * 2.0**121
_DROPPED_BITS = 16


def picked_bytes(count: int, group: int, bits: int) -> int:
    """Bytes of `count` picked values."""
    return _HEADER_BYTES[bits] * num_blocks(count, group) + packed_bytes(count, bits)


def encode_picked(picked: torch.Tensor, group: int, bits: int, out: torch.Tensor) -> None:
    """Write coded 1-D fp32 values, all finite, to `out`, uint8 of `picked_bytes`."""
    header, body = _split(out, picked.numel(), group, bits)
    if bits == 32:
        body.copy_(picked.view(torch.uint8))
    elif bits == 8:
        _encode_integers(picked, group, header, body)
    else:
        _encode_sizes(picked, group, header.view(-1, 2), body)


def decode_picked(coded: torch.Tensor, count: int, group: int, bits: int) -> torch.Tensor:
    """1-D fp32 values. Raises MessageError on a scale, magnitude or value that no encoder writes."""
    header, body = _split(coded, count, group, bits)
    if bits == 32:
        return checked_values(body.view(torch.float32), "topk")
    if bits == 8:
        # -128 is nothing that an encoder writes; it counts as -127.
        values = body.view(torch.int8).clamp(min=-_LEVELS).float()
        multiply_blocks(values, checked_scales(header, MIN_SCALE, _MAX_SCALE, "topk"), group, out=values)
        return values
    codes = unpack(body, 2, count)
    magnitudes = checked_scales(header, 0.0, _MAX_BF16, "topk")
    places = (codes & 1).long() + 2 * _chunk_of_each(count, group)
    values = magnitudes.index_select(0, places)
    return torch.where(codes >= _NEGATIVE, -values, values)


def _split(coded: torch.Tensor, count: int, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the header (bf16) and the packed codes (uint8)."""
    end = _HEADER_BYTES[bits] * num_blocks(count, group)
    return coded[:end].view(torch.bfloat16), coded[end:]


def _chunk_of_each(count: int, group: int) -> torch.Tensor:
    return torch.arange(num_blocks(count, group)).repeat_interleave(group)[:count]


def _encode_integers(picked: torch.Tensor, group: int, header: torch.Tensor, body: torch.Tensor) -> None:
    steps = (block_peaks(picked.abs(), group) / _LEVELS).clamp_(min=MIN_SCALE)
    header.copy_(round_up(steps, _DROPPED_BITS).clamp_(max=_MAX_SCALE))
    codes = torch.empty_like(picked)
    multiply_blocks(picked, header.float().reciprocal_(), group, out=codes)
    body.view(torch.int8).copy_(codes.round_())


def _encode_sizes(picked: torch.Tensor, group: int, header: torch.Tensor, body: torch.Tensor) -> None:
    # Before anything is compared or added: a process that flushes denormals sees the same.
    magnitudes = torch.where(picked.abs() < MIN_SCALE, 0.0, picked.abs())
    chunks = _chunk_of_each(picked.numel(), group)
    large = (magnitudes >= _means(magnitudes, chunks, len(header)).index_select(0, chunks)).long()
    means = _means(magnitudes, 2 * chunks + large, 2 * len(header))
    header.view(-1).copy_(means.clamp_(max=_MAX_BF16))
    pack((large + _NEGATIVE * ((picked < 0) & (magnitudes > 0))).to(torch.uint8), 2, out=body)


def _means(values: torch.Tensor, bins: torch.Tensor, num_bins: int) -> torch.Tensor:
    """The mean in fp32 of the values in each bin, 0 of none. bincount adds one after the other on every machine."""
    sums = torch.bincount(bins, weights=values.double(), minlength=num_bins)
    return (sums / torch.bincount(bins, minlength=num_bins).clamp_(min=1)).float()
