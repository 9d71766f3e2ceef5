"""Encode the values that topk selects with 2, 8 or 32 bits each; `top_k` values belong to each
chunk.

2: a sign, and one bit that is set if the magnitude reaches the chunk's mean magnitude. It decodes
to the mean
   magnitude of the chunk's values with the same bit, so the sum of magnitudes is kept up to the
   rounding to bf16. Adds 4 bytes for each chunk.
8: an integer from -127 to 127 times the chunk's scale, which is the largest magnitude / 127 rounded
up to a bf16:
   |error| <= 0.5001 scale. Adds 2 bytes for each chunk.
32: the fp32 value.

With 2 and 8 bits, magnitudes below 2**-108 become 0, and the largest is bf16's, 3.39e38.
"""

import torch

from outer.codecs.packing.bits import pack, packed_bytes, unpack
from outer.codecs.packing.block_scales import (
    MIN_SCALE,
    block_peaks,
    check_scales,
    multiply_blocks,
    num_blocks,
    round_up,
)
from outer.codecs.packing.checks import check_values

_HEADER_BYTES = {2: 4, 8: 2, 32: 0}
_MAX_BF16 = (2.0 - 2.0**-7) * 2.0**127
_NEGATIVE = 2
_LEVELS = 127
# The largest bf16 that is finite after multiplication by 127. With it the largest fp32 is 127.01
# steps, which is still code 127.
_MAX_SCALE = (1 + 2.0**-7) * 2.0**121
_DROPPED_BITS = 16


def selected_bytes(count: int, top_k: int, bits: int) -> int:
    """Return the size in bytes of `count` encoded values."""
    return _HEADER_BYTES[bits] * num_blocks(count, top_k) + packed_bytes(count, bits)


def encode_values(selected: torch.Tensor, top_k: int, bits: int, out: torch.Tensor) -> None:
    """Encode finite 1-D fp32 values into `out` (uint8, `selected_bytes` long)."""
    header, body = _split(out, selected.numel(), top_k, bits)
    if bits == 32:
        body.copy_(selected.view(torch.uint8))
    elif bits == 8:
        _encode_integers(selected, top_k, header, body)
    else:
        _encode_sizes(selected, top_k, header.view(-1, 2), body)


def decode_values(encoded: torch.Tensor, count: int, top_k: int, bits: int) -> torch.Tensor:
    """Decode into 1-D fp32 values. Raises MessageError on an impossible scale, magnitude or
    value.
    """
    header, body = _split(encoded, count, top_k, bits)
    if bits == 32:
        return check_values(body.view(torch.float32), "topk")
    if bits == 8:
        # No encoder writes -128; it is read as -127.
        values = body.view(torch.int8).clamp(min=-_LEVELS).float()
        multiply_blocks(
            values, check_scales(header, MIN_SCALE, _MAX_SCALE, "topk"), top_k, out=values
        )
        return values
    codes = unpack(body, 2, count)
    magnitudes = check_scales(header, 0.0, _MAX_BF16, "topk")
    places = (codes & 1).long() + 2 * _chunk_of_each(count, top_k)
    values = magnitudes.index_select(0, places)
    return torch.where(codes >= _NEGATIVE, -values, values)


def _split(
    encoded: torch.Tensor, count: int, top_k: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the header (bf16) and the packed codes (uint8)."""
    end = _HEADER_BYTES[bits] * num_blocks(count, top_k)
    return encoded[:end].view(torch.bfloat16), encoded[end:]


def _chunk_of_each(count: int, top_k: int) -> torch.Tensor:
    return torch.arange(num_blocks(count, top_k)).repeat_interleave(top_k)[:count]


def _encode_integers(
    selected: torch.Tensor, top_k: int, header: torch.Tensor, body: torch.Tensor
) -> None:
    steps = (block_peaks(selected.abs(), top_k) / _LEVELS).clamp_(min=MIN_SCALE)
    header.copy_(round_up(steps, _DROPPED_BITS).clamp_(max=_MAX_SCALE))
    codes = torch.empty_like(selected)
    multiply_blocks(selected, header.float().reciprocal_(), top_k, out=codes)
    body.view(torch.int8).copy_(codes.round_())


def _encode_sizes(
    selected: torch.Tensor, top_k: int, header: torch.Tensor, body: torch.Tensor
) -> None:
    # This comes before any comparison or sum, so that processes that flush denormals get the same
    # result.
    magnitudes = torch.where(selected.abs() < MIN_SCALE, 0.0, selected.abs())
    chunks = _chunk_of_each(selected.numel(), top_k)
    large = (magnitudes >= _means(magnitudes, chunks, len(header)).index_select(0, chunks)).long()
    means = _means(magnitudes, 2 * chunks + large, 2 * len(header))
    header.view(-1).copy_(means.clamp_(max=_MAX_BF16))
    pack((large + _NEGATIVE * ((selected < 0) & (magnitudes > 0))).to(torch.uint8), 2, out=body)


def _means(values: torch.Tensor, bins: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Return the fp32 mean of the values in each bin, 0 for an empty bin. bincount adds
    sequentially on every machine.
    """
    sums = torch.bincount(bins, weights=values.double(), minlength=num_bins)
    return (sums / torch.bincount(bins, minlength=num_bins).clamp_(min=1)).float()
