"""The stat2 codec: 2 bits per element, with a table of four values per block of 512."""

import torch

from outer.codecs.packing.bits import pack, packed_bytes, unpack
from outer.codecs.packing.block_scales import (
    columns_of,
    finite_peaks,
    multiply_blocks,
    num_blocks,
    rows_of,
)
from outer.codecs.packing.checks import check_payload, check_values, flat_fp32

# The table takes 64 bits per block. 512 is the largest block whose sums on the grid below are
# exact. With normally distributed values, blocks of half the size lose 1 % less energy, which is
# worth only a tenth of the 0.125 bits per element that they cost.
_BLOCK = 512
_LEVELS = 4
_STEP_SIGMAS = 6 / _LEVELS
# Values are first rounded to a grid of 2 x 32767 steps. Sums of steps are integers below 2**24,
# which fp32 represents exactly, so the order of summation does not matter.
_GRID_STEPS = 32767
# Every denormal is below 2**-10 of a grid step. A mean on the grid is at least 2**-9 of a step, so
# it is never denormal.
_MIN_GRID = 2.0**-116
_MAX_ENTRY = (2.0 - 2.0**-7) * 2.0**127


class Stat2Codec:
    """code = round((x - mean) / (1.5 sigma) + 2) in 0 to 3, which decodes to the mean of the
    block's x with that code.

    A block therefore keeps its sum, up to the rounding of the table entries to bf16 (2**-9 of each)
    and of x to the nearest multiple of 1/32767 of the block's largest magnitude, or of 2**-116. A
    block with only one or two distinct values decodes to them, up to that rounding. Payload: the
    tables (bf16, 4 entries for each block, 0 for an unused code), then the codes.
    """

    name = "stat2"
    is_coarse = True
    gathers = False
    block_elements = _BLOCK

    def num_bytes(self, num_elements: int) -> int:
        """Return the payload size: a quarter byte per element, plus 8 bytes per block, which is
        2.125 bits per element.
        """
        return 2 * _LEVELS * num_blocks(num_elements, _BLOCK) + packed_bytes(num_elements, 2)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        values = flat_fp32(values)
        scratch = values.abs()
        grids = (finite_peaks(scratch, _BLOCK, values) / _GRID_STEPS).clamp_(min=_MIN_GRID)
        multiply_blocks(values, grids.reciprocal(), _BLOCK, out=scratch)
        steps = scratch.round_()
        codes = torch.empty_like(steps)
        payload = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8)
        tables, packed = _split(payload, grids.numel())
        rows = zip(rows_of(steps, _BLOCK), rows_of(codes, _BLOCK), strict=True)
        means = torch.cat([_bin_means(row, _fill_codes(row, row_codes)) for row, row_codes in rows])
        tables.copy_(means.mul_(grids[:, None]).clamp_(-_MAX_ENTRY, _MAX_ENTRY))
        pack(codes.to(torch.int8).view(torch.uint8), 2, out=packed)
        return payload

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Decode into 1-D fp32 values. Raises MessageError on a wrong size, and on inf or nan in a
        table.
        """
        payload = check_payload(payload, self.num_bytes(num_elements), self.name)
        tables, packed = _split(payload, num_blocks(num_elements, _BLOCK))
        entries = check_values(tables.float().view(-1), self.name)
        places = unpack(packed, 2, num_elements).int()
        first_entries = torch.arange(0, entries.numel(), _LEVELS, dtype=torch.int32)
        columns = columns_of(first_entries, num_elements, _BLOCK)
        for row, column in zip(rows_of(places, _BLOCK), columns, strict=False):
            row.add_(column)
        return entries.index_select(0, places)


def _split(payload: torch.Tensor, num_tables: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a payload's tables (bf16, blocks x 4) and packed codes (uint8)."""
    end = 2 * _LEVELS * num_tables
    return payload[:end].view(torch.bfloat16).view(-1, _LEVELS), payload[end:]


def _fill_codes(steps: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the codes (fp32) of grid steps to `out` and return it. Both have shape (blocks,
    elements).
    """
    size = steps.shape[1]
    torch.sub(steps, (steps.sum(1) / size)[:, None], out=out)
    sigmas = (_ordered_sum(out * out) / size).sqrt_()
    # In a block of equal values sigma is 0, and each value gets code 2.
    factors = (sigmas * _STEP_SIGMAS).clamp_(min=1e-6).reciprocal_()
    return out.mul_(factors[:, None]).add_(_LEVELS // 2).round_().clamp_(0, _LEVELS - 1)


def _ordered_sum(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, added pairwise in an order that is the same on every machine.
    Overwrites `rows`.
    """
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        if rows.shape[1] % 2:
            rows[:, 0] += rows[:, -1]
        rows = rows[:, :half].add_(rows[:, half : 2 * half])
    return rows[:, 0]


def _bin_means(steps: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the mean of the grid steps of each code, shape (blocks, 4); 0 for an unused code."""
    size = steps.shape[1]
    sums = [steps.sum(1)]
    counts = [torch.full((len(steps),), float(size))]
    above = torch.empty_like(codes)
    for code in range(1, _LEVELS):
        # The result is 1 where the element's code is at least `code`, and 0 elsewhere. A comparison
        # to bool would be slower.
        torch.sub(codes, code - 1, out=above).clamp_(0, 1)
        counts.append(above.sum(1))
        sums.append(above.mul_(steps).sum(1))
    of_each = [
        torch.stack([*column, torch.zeros(len(steps))], 1).diff(dim=1).neg_()
        for column in (sums, counts)
    ]
    return of_each[0] / of_each[1].clamp_(min=1)
