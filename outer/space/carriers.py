"""The carrier of each part: a rank that holds a large share of the part."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from outer.space.holdings import Holdings
from outer.space.layout import Space, matrix_cols


class Overlaps(NamedTuple):
    """Overlaps of all rectangles with the parts, ordered by rectangle, then part. Arrays are
    int64, 1-D.
    """

    rectangle: np.ndarray
    """Index of the row in `Holdings.rectangles`."""
    part: np.ndarray
    num_elements: np.ndarray


def count_overlaps(space: Space, rectangles: np.ndarray) -> Overlaps:
    """Return the overlaps of `Holdings.rectangles` with the parts."""
    name, r0, r1, c0, c1 = rectangles.T
    num_cols = np.array([matrix_cols(shape) for shape in space.shapes.values()], np.int64)[name]
    base = np.array(list(space.offsets.values()), np.int64)[name]
    starts = np.array([part.start for part in space.parts], np.int64)
    low = np.searchsorted(starts, base + r0 * num_cols + c0, side="right") - 1
    high = np.searchsorted(starts, base + (r1 - 1) * num_cols + c1 - 1, side="right")
    which = np.repeat(np.arange(len(rectangles)), high - low)
    parts = np.arange(len(which)) - np.repeat(np.cumsum(high - low) - high, high - low)
    bounds = np.append(starts, space.num_elements)
    columns = rectangles[which], num_cols[which], base[which]
    num_elements = _count_before(bounds[parts + 1], *columns) - _count_before(
        bounds[parts], *columns
    )
    shared = num_elements > 0
    return Overlaps(which[shared], parts[shared], num_elements[shared])


def _count_before(
    at: np.ndarray, rectangles: np.ndarray, num_cols: np.ndarray, base: np.ndarray
) -> np.ndarray:
    """Return the number of elements of each rectangle that are before index `at` of the flat
    vector.
    """
    _, r0, r1, c0, c1 = rectangles.T
    row, col = np.divmod(np.maximum(at - base, 0), num_cols)
    in_this_row = np.where((r0 <= row) & (row < r1), np.clip(col - c0, 0, c1 - c0), 0)
    return (np.clip(row, r0, r1) - r0) * (c1 - c0) + in_this_row


def assign_carriers(
    space: Space, holdings: Holdings, overlaps: Overlaps, num_ranks: int
) -> list[int]:
    """Return the carrier of each part: the rank with the least load so far, among the ranks that
    hold much of the part.

    These are the ranks that hold at least half as much of it as the rank that holds most. If a part
    is larger than the slices, many ranks hold about the same share, and a rank whose share is
    slightly larger by chance would carry twice as much as others. The parts must be covered
    (`check_coverage`).
    """
    loads = [0] * num_ranks
    carriers = []
    for part, ranks in zip(space.parts, _find_main_holders(holdings, overlaps), strict=True):
        carrier = min(ranks, key=loads.__getitem__)
        loads[carrier] += part.num_elements
        carriers.append(carrier)
    return carriers


def _find_main_holders(holdings: Holdings, overlaps: Overlaps) -> Iterator[list[int]]:
    """Yield for each part the ranks that hold at least half as much of it as the rank that holds
    most, ascending.
    """
    counts = np.diff(holdings.starts)[overlaps.rectangle]
    entry = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    holding = holdings.holding[entry + np.repeat(holdings.starts[overlaps.rectangle], counts)]
    pairs, which = np.unique(
        np.repeat(overlaps.part, counts) * len(holdings.ranks) + holding, return_inverse=True
    )
    # float64 is exact here, because no part has 2^53 elements.
    held = np.bincount(which, weights=np.repeat(overlaps.num_elements, counts))
    part, holding = np.divmod(pairs, len(holdings.ranks))
    first = np.flatnonzero(np.diff(part, prepend=-1))
    is_main = 2 * held >= np.repeat(
        np.maximum.reduceat(held, first), np.diff(first, append=len(part))
    )
    chosen = holding[is_main].tolist()
    ends = np.cumsum(np.add.reduceat(is_main.astype(np.int64), first)).tolist()
    sorted_ranks: dict[tuple[int, ...], list[int]] = {}
    for start, end in pairwise([0, *ends]):
        key = tuple(chosen[start:end])
        if key not in sorted_ranks:
            sorted_ranks[key] = sorted(rank for index in key for rank in holdings.ranks[index])
        yield sorted_ranks[key]
