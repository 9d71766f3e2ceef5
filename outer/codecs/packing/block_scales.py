"""Blocks of a part that share a scale: their largest magnitudes, factors and 16-bit scales."""

import math

import torch

from outer.codecs.packing.checks import non_finite_error
from outer.errors import MessageError

MIN_SCALE = 2.0**-108
"""Smallest 16-bit scale. Denormals are below 2**-18 of it, so flushing them to zero changes no
payload."""


def num_blocks(num_elements: int, block: int) -> int:
    """Return the number of blocks, including a partial last block."""
    return -(-num_elements // block)


def rows_of(values: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Return views (blocks, elements) of a flat tensor: one of all full blocks, and one of a
    partial last block, if there is one.
    """
    end = values.numel() // block * block
    rows = [values[:end].view(-1, block)]
    return rows if end == values.numel() else [*rows, values[end:].view(1, -1)]


def split_scales(payload: torch.Tensor, num_scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a payload's scales (bf16), which come first, and of its remaining bytes
    (uint8).
    """
    return payload[: 2 * num_scales].view(torch.bfloat16), payload[2 * num_scales :]


def columns_of(
    numbers: torch.Tensor, num_elements: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one number per block as columns: one column for each view that `rows_of` returns
    for `num_elements`.
    """
    num_full = num_elements // block
    return numbers[:num_full, None], numbers[num_full:, None]


def block_peaks(magnitudes: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest magnitude of each block; inf or nan if the block contains one."""
    return torch.cat([row.amax(1) for row in rows_of(magnitudes, block)])


def finite_peaks(magnitudes: torch.Tensor, block: int, values: torch.Tensor) -> torch.Tensor:
    """Return `block_peaks` of the magnitudes of `values`. Raises NonFiniteError if a value is
    inf or nan.
    """
    peaks = block_peaks(magnitudes, block)
    if peaks.numel() and not math.isfinite(peaks.max().item()):
        raise non_finite_error(values)
    return peaks


def multiply_blocks(
    values: torch.Tensor, factors: torch.Tensor, block: int, out: torch.Tensor
) -> None:
    """Multiply each block of `values` by its factor into `out`, which may be `values`."""
    columns = columns_of(factors, values.numel(), block)
    for row, column, row_out in zip(
        rows_of(values, block), columns, rows_of(out, block), strict=False
    ):
        torch.mul(row, column, out=row_out)


def round_up(scales: torch.Tensor, dropped_bits: int) -> torch.Tensor:
    """Round positive fp32 `scales` up, in place, to numbers whose last `dropped_bits` bits are
    zero.
    """
    mask = (1 << dropped_bits) - 1
    scales.view(torch.int32).add_(mask).bitwise_and_(~mask)
    return scales


def check_scales(scales: torch.Tensor, low: float, high: float, codec: str) -> torch.Tensor:
    """Convert `scales` to fp32. Raises MessageError unless all are between the bounds; nan is
    never valid.
    """
    scales = scales.float()
    if scales.numel():
        least, most = (bound.item() for bound in torch.aminmax(scales))
        if not (least >= low and most <= high):
            raise MessageError(
                f"{codec} scales between {least} and {most}, allowed {low} to {high}"
            )
    return scales
