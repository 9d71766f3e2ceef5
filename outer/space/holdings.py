"""Holdings: the rectangles of the parameters that each rank of an island holds.

On 512 ranks a model of 70B parameters has 370,000 slices, so they are rows of arrays:

    rectangles   [name, first row, end row, first col, end col]    each rectangle once, sorted
    holdings     all rectangles of one rank; equal holdings, as of replicas, are kept once
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from outer.errors import InputError
from outer.space.layout import SliceBounds, Space, matrix_shape

MOST_NAMED = 4
"""Most rectangles, and ranks of one, that an error names."""


class Rectangle(NamedTuple):
    """A slice that some rank holds, by its bounds."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]


class RankSlices(NamedTuple):
    """The slices of one rank, in the form that it sends to the others."""

    names: tuple[str, ...]
    bounds: np.ndarray
    """int64 (slices, 4): first row, end row, first col, end col."""


def pack_slices(slices: Sequence[SliceBounds]) -> RankSlices:
    """Pack the slices into an array."""
    bounds = np.array([(*s.rows, *s.cols) for s in slices], np.int64).reshape(-1, 4)
    return RankSlices(tuple(s.name for s in slices), bounds)


class Holdings:
    """The rectangles of all ranks, and the ranks that hold each of them. The object is the same
    on all ranks.
    """

    def __init__(self, space: Space, slices_by_rank: Sequence[RankSlices]) -> None:
        """Build the holdings. Raises InputError if a rank holds a parameter that the model does
        not have.
        """
        self._names = space.names
        alike: dict[tuple[tuple[str, ...], bytes], list[int]] = {}
        for rank, slices in enumerate(slices_by_rank):
            alike.setdefault((slices.names, slices.bounds.tobytes()), []).append(rank)
        self.ranks = list(alike.values())
        """The ranks with each holding, ascending."""
        rows = [_rows(space, slices_by_rank[ranks[0]]) for ranks in self.ranks]
        holding = np.repeat(np.arange(len(rows)), [len(held) for held in rows])
        self.rectangles, which = _find_distinct(np.concatenate(rows))
        """int64 (rectangles, 5): index of the name in `space.names`, then the bounds. No
        rectangle is empty."""
        held_once, _ = _find_distinct(np.stack([which, holding], axis=1))
        self.holding = held_once[:, 1]
        """The indices of the holdings that contain each rectangle, one rectangle after the
        other."""
        self.starts = np.searchsorted(held_once[:, 0], np.arange(len(self.rectangles) + 1))
        """Index in `holding` at which the entries of each rectangle begin, followed by the
        length of `holding`."""

    def rectangle(self, index: int) -> Rectangle:
        """Return a rectangle by its row in `rectangles`."""
        name, *bounds = self.rectangles[index].tolist()
        return Rectangle(self._names[name], (bounds[0], bounds[1]), (bounds[2], bounds[3]))

    def holders(self, index: int) -> list[int]:
        """Return the ranks that hold a rectangle, ascending."""
        holdings = self.holding[self.starts[index] : self.starts[index + 1]].tolist()
        return sorted(rank for holding in holdings for rank in self.ranks[holding])

    def of_rank(self, rank: int) -> list[int]:
        """Return the rows of `rectangles` that a rank holds, ascending."""
        holding = next(i for i, ranks in enumerate(self.ranks) if rank in ranks)
        return (
            np.searchsorted(self.starts, np.flatnonzero(self.holding == holding), side="right") - 1
        ).tolist()


def _rows(space: Space, slices: RankSlices) -> np.ndarray:
    """Return rows for `Holdings.rectangles`, in the order of the slices, without empty ones."""
    unknown = [name for name in slices.names if name not in space.name_index]
    if unknown:
        raise InputError(f"the island's ranks hold {unknown[0]!r}, which the model does not have")
    names = np.array([space.name_index[name] for name in slices.names], np.int64)
    rows = np.column_stack([names, slices.bounds])
    return rows[(rows[:, 1] < rows[:, 2]) & (rows[:, 3] < rows[:, 4])]


def _find_distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows, sorted, and the index of each row among them. np.unique with an
    axis takes several times as long.
    """
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    which = np.empty(len(rows), np.int64)
    which[order] = np.cumsum(is_first) - 1
    return ordered[is_first], which


def check_coverage(space: Space, holdings: Holdings) -> None:
    """Raise InputError unless the rectangles cover the model exactly once."""
    sizes = np.array([matrix_shape(shape) for shape in space.shapes.values()], np.int64).reshape(
        -1, 2
    )
    name, r0, r1, c0, c1 = holdings.rectangles.T
    areas = _sum_by_name(name, (r1 - r0) * (c1 - c0), len(sizes))
    # The outline consists of the points that are a corner of an odd number of rectangles. If these
    # are just the matrix's own four corners, every element is covered an odd number of times. If
    # the area matches as well, each is covered exactly once.
    corners = np.concatenate(
        [np.stack([name, row, col], axis=1) for row, col in product((r0, r1), (c0, c1))]
    )
    points, which = _find_distinct(corners)
    name, row, col = points[np.bincount(which, minlength=len(points)) % 2 == 1].T
    num_rows, num_cols = sizes[name].T
    is_own = ((row == 0) | (row == num_rows)) & ((col == 0) | (col == num_cols))
    num_own, num_others = (_sum_by_name(name, kind, len(sizes)) for kind in (is_own, ~is_own))
    wanted = sizes.prod(axis=1)
    is_wrong = (areas != wanted) | (num_own != 4 * (wanted > 0)) | (num_others > 0)
    if is_wrong.any():
        first = int(is_wrong.argmax())
        raise InputError(
            f"the island's ranks do not hold {space.names[first]!r} exactly once: it has "
            f"{wanted[first]} elements, their slices {areas[first]} "
            f"({_describe_holders(holdings, first)}); the mesh must split it into slices that do "
            "not overlap, replicas as equal ones"
        )


def _describe_holders(holdings: Holdings, name: int) -> str:
    """Return in words who holds the first rectangles of a name."""
    found = np.flatnonzero(holdings.rectangles[:, 0] == name).tolist()
    texts = []
    for index in found[:MOST_NAMED]:
        _, rows, cols = holdings.rectangle(index)
        holders = holdings.holders(index)
        ranks = ", ".join(map(str, holders[:MOST_NAMED])) + (
            ", ..." if len(holders) > MOST_NAMED else ""
        )
        texts.append(f"rank {ranks}: rows {rows[0]} to {rows[1]}, columns {cols[0]} to {cols[1]}")
    return (
        "; ".join(texts + (["..."] if len(found) > MOST_NAMED else [])) or "no rank holds any of it"
    )


def _sum_by_name(names: np.ndarray, values: np.ndarray, num_names: int) -> np.ndarray:
    sums = np.zeros(num_names, np.int64)
    np.add.at(sums, names, values)
    return sums
