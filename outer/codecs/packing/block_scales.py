"""A part cut into blocks that share a scale: their peaks, their factors, and scales of 16 bits."""

import math

import torch

from outer.codecs.checks import non_finite_error
from outer.errors import MessageError

MIN_SCALE = 2.0**-108
"""The least 16-bit scale. No denormal is as much as 2**-18 of it, so that flushing them changes no byte."""


def num_blocks(num_elements: int, block: int) -> int:
    """Blocks begun."""
    return -(-num_elements // block)


def rows_of(values: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Views (blocks, elements) of a flat tensor: one of all full blocks, one of the rest where there is a rest."""
    end = values.numel() // block * block
    rows = [values[:end].view(-1, block)]
    return rows if end == values.numel() else [*rows, values[end:].view(1, -1)]


def split_scales(payload: torch.Tensor, num_scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a payload's scales (bf16), which come first, and of the rest (uint8)."""
    return payload[: 2 * num_scales].view(torch.bfloat16), payload[2 * num_scales :]


def columns_of(numbers: torch.Tensor, num_elements: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One number a block, as a column beside each of `rows_of` that many elements."""
    num_full = num_elements // block
    return numbers[:num_full, None], numbers[num_full:, None]


def block_peaks(magnitudes: torch.Tensor, block: int) -> torch.Tensor:
    """The largest of each block; inf or nan where the block holds one."""
    return torch.cat([row.amax(1) for row in rows_of(magnitudes, block)])


def finite_peaks(magnitudes: torch.Tensor, block: int, values: torch.Tensor) -> torch.Tensor:
    """`block_peaks`. Raises NonFiniteError when one of `values`, whose magnitudes they are, is inf or nan."""
    peaks = block_peaks(magnitudes, block)
    if peaks.numel() and not math.isfinite(peaks.max().item()):
        raise non_finite_error(values)
    return peaks


def multiply_blocks(values: torch.Tensor, factors: torch.Tensor, block: int, out: torch.Tensor) -> None:
    """Write each block of `values` times its factor to `out`, which may be `values`."""
    columns = columns_of(factors, values.numel(), block)
    for row, column, row_out in zip(rows_of(values, block), columns, rows_of(out, block), strict=False):
        torch.mul(row, column, out=row_out)


def round_up(scales: torch.Tensor, dropped_bits: int) -> torch.Tensor:
    """`scales`, positive fp32, changed in place to the next number with that many bits less of fp32's 24."""
    mask = (1 << dropped_bits) - 1
    scales.view(torch.int32).add_(mask).bitwise_and_(~mask)
    return scales


def checked_scales(scales: torch.Tensor, low: float, high: float, codec: str) -> torch.Tensor:
    """`scales` in fp32. Raises MessageError unless every one lies between the bounds; nan does not."""
    scales = scales.float()
    if scales.numel():
        least, most = (bound.item() for bound in torch.aminmax(scales))
        if not (least >= low and most <= high):
            raise MessageError(f"{codec} scales between {least} and {most}, allowed {low} to {high}")
    return scales
