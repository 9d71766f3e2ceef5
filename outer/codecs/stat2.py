"""The stat2 codec: 2 bits an element, and a table of four values for each block of 512."""

import torch

from outer.codecs.blocks import columns_of, finite_peaks, multiply_blocks, num_blocks, rows_of
from outer.codecs.checks import checked_payload, checked_values, flat_fp32
from outer.codecs.packing import pack, packed_bytes, unpack

# The table is 64 bits a block. 512 is the most whose sums on the grid below are exact. On normal values half the
# block loses 1 % less energy, which is worth a tenth of the 0.125 bits an element that it costs.
_BLOCK = 512
_LEVELS = 4
_STEP_SIGMAS = 6 / _LEVELS
# Values are first put on a grid of 2 x 32767 steps, where sums are integers below 2**24: exact in fp32, so the same
# in whatever order a machine adds.
_GRID_STEPS = 32767
# No denormal is as much as 2**-10 of a grid step, and no mean on the grid, 2**-9 of a step or more, is denormal.
_MIN_GRID = 2.0**-116
_MAX_ENTRY = (2.0 - 2.0**-7) * 2.0**127


class Stat2Codec:
    """code = round((x - mean) / (1.5 sigma) + 2) in 0 to 3; it decodes to the mean of the block's x with that code.

    So a block's sum survives, but for rounding: the table's bf16 (2**-9 of each entry), and x itself, which counts
    as the nearest multiple of 1/32767 of the block's largest magnitude, or of 2**-116. A block of one value or
    two decodes to them, within that rounding. Payload: the tables (bf16, 4 for each block, 0 where a code is not
    used), then the codes.
    """

    name = "stat2"
    block_elements = _BLOCK

    def num_bytes(self, num_elements: int) -> int:
        """A quarter byte an element, 8 for each block begun: 2.125 bits an element."""
        return 2 * _LEVELS * num_blocks(num_elements, _BLOCK) + packed_bytes(num_elements, 2)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The payload of `values`. Raises NonFiniteError."""
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
        """1-D fp32 values. Raises MessageError on a wrong size, and on inf or nan in a table."""
        payload = checked_payload(payload, self.num_bytes(num_elements), self.name)
        tables, packed = _split(payload, num_blocks(num_elements, _BLOCK))
        entries = checked_values(tables.float().view(-1), self.name)
        places = unpack(packed, 2, num_elements).int()
        first_entries = torch.arange(0, entries.numel(), _LEVELS, dtype=torch.int32)
        columns = columns_of(first_entries, num_elements, _BLOCK)
        for row, column in zip(rows_of(places, _BLOCK), columns, strict=False):
            row.add_(column)
        return entries.index_select(0, places)


def _split(payload: torch.Tensor, num_tables: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a payload's tables (bf16, blocks x 4) and packed codes (uint8)."""
    end = 2 * _LEVELS * num_tables
    return payload[:end].view(torch.bfloat16).view(-1, _LEVELS), payload[end:]


def _fill_codes(steps: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out`, holding the codes (fp32) of grid steps, both blocks x elements."""
    size = steps.shape[1]
    torch.sub(steps, (steps.sum(1) / size)[:, None], out=out)
    sigmas = (_ordered_sum(out * out) / size).sqrt_()
    # All equal: nothing to divide, and each is code 2.
    factors = (sigmas * _STEP_SIGMAS).clamp_(min=1e-6).reciprocal_()
    return out.mul_(factors[:, None]).add_(_LEVELS // 2).round_().clamp_(0, _LEVELS - 1)


def _ordered_sum(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, which is lost, by halving: in an order that no machine changes."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        if rows.shape[1] % 2:
            rows[:, 0] += rows[:, -1]
        rows = rows[:, :half].add_(rows[:, half : 2 * half])
    return rows[:, 0]


def _bin_means(steps: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The mean of each code's grid steps, blocks x 4; 0 where a code is not used."""
    size = steps.shape[1]
    sums, counts = [steps.sum(1)], [torch.full((len(steps),), float(size))]
    above = torch.empty_like(codes)
    for code in range(1, _LEVELS):
        # 1 where the code is at least this, 0 elsewhere; comparing to a bool would be slower.
        torch.sub(codes, code - 1, out=above).clamp_(0, 1)
        counts.append(above.sum(1))
        sums.append(above.mul_(steps).sum(1))
    of_each = [torch.stack([*column, torch.zeros(len(steps))], 1).diff(dim=1).neg_() for column in (sums, counts)]
    return of_each[0] / of_each[1].clamp_(min=1)
