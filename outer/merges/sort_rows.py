"""Sorts the participants' parts coordinate by coordinate."""

from collections.abc import Iterator, Sequence
from functools import cache

import torch

CHUNK = 32768
"""Number of elements that are sorted at once, so that the rows of eight participants stay in a
core's cache.
"""


def chunks(num_elements: int) -> Iterator[slice]:
    """Yield slices of at most CHUNK elements that together cover `num_elements`."""
    for start in range(0, num_elements, CHUNK):
        yield slice(start, min(start + CHUNK, num_elements))


def sort_rows(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return new rows in which each coordinate is in ascending order over the rows. `rows` are
    not changed.
    """
    # Comparing whole rows is vectorised; torch.sort and numpy.sort along the short axis take 4 to
    # 20 times as long.
    result = list(rows)
    for low, high in comparators(len(result)):
        result[low], result[high] = (
            torch.minimum(result[low], result[high]),
            torch.maximum(result[low], result[high]),
        )
    return result


def coordinate_median(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the median of every coordinate, 1-D fp32. For an even number of parts it is the
    mean of the two middle values.
    """
    lower = (len(parts) - 1) // 2
    upper = len(parts) // 2
    result = torch.empty_like(parts[0])
    for chunk in chunks(result.numel()):
        rows = sort_rows([values[chunk] for values in parts])
        # The values are halved before the addition, because the sum of two finite values may be
        # infinite.
        result[chunk] = rows[lower] * 0.5 + rows[upper] * 0.5
    return result


@cache
def comparators(num_rows: int) -> tuple[tuple[int, int], ...]:
    """Return Batcher's merge exchange sort: pairs (low, high) that sort any rows when they are
    compared in this order.
    """
    #   num_rows   comparators
    #   2          (0,1)
    #   3          (0,2) (0,1) (1,2)
    #   4          (0,2) (1,3) (0,1) (2,3) (1,2)
    #   8          19 of them; 16: 63; 64: 543
    found: list[tuple[int, int]] = []
    top = 1 << max((num_rows - 1).bit_length() - 1, 0)
    step = top
    while step:
        distance = step
        wanted = 0
        span = top
        while True:
            found += [(i, i + distance) for i in range(num_rows - distance) if i & step == wanted]
            if span == step:
                break
            distance = span - step
            wanted = step
            span = span // 2
        step //= 2
    return tuple(found)
