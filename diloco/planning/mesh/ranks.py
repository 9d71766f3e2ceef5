"""Show the positions of an island's ranks on its mesh, and their groups, as plain text. Does not
import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from inner.mesh import AXES, SPARSE_AXES, Degrees

MAX_ROWS = 8
"""Most rows of a grid that shows every rank. Larger meshes get a grid of blocks and a grid of the
first block."""
MAX_BLOCK_ROWS = 4

MeshCoordinates = tuple[int, ...]
"""Coordinates on the axes that vary over the rows of a grid."""


def rank_groups(degrees: Degrees, *axes: str) -> list[list[int]]:
    """Return the groups of ranks that differ only on `axes`, ordered by their first ranks."""
    by_other_axes: dict[tuple[int, ...], list[int]] = {}
    of_experts = "edp" in axes or "ep" in axes
    for rank in range(degrees.num_ranks):
        coordinates = degrees.coordinates(rank, SPARSE_AXES if of_experts else AXES)
        by_other_axes.setdefault(
            tuple(at for axis, at in coordinates.items() if axis not in axes), []
        ).append(rank)
    return list(by_other_axes.values())


def rank_text(ranks: Sequence[int]) -> str:
    """Return `0-7` for consecutive ranks, otherwise `0 2 4 6`, or `0 16 .. 240` for more than four
    ranks.
    """
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
    return " ".join(map(str, ranks))


def groups_text(groups: Sequence[Sequence[int]], width: int) -> str:
    """Return as many of the first groups as fit into `width`, followed by `...` if groups are left
    out.
    """
    texts = [rank_text(group) for group in groups]
    for count in range(len(texts), 0, -1):
        text = " | ".join(texts[:count] + ["..."] * (count < len(texts)))
        if len(text) <= width:
            return text
    return texts[0]


def select_shown(count: int, most: int) -> list[int | None]:
    """Return the indices of at most `most` of `count` items to show: the first, None for omitted
    items, and the last.
    """
    if count <= most:
        return list(range(count))
    return [*range(max(1, most - 2)), None, count - 1]


@dataclass(frozen=True)
class View:
    """The ranks of a mesh by the coordinates on some axes, the slowest first."""

    degrees: Degrees
    axes: tuple[str, ...]
    title: str

    def size(self, axis: str) -> int:
        return getattr(self.degrees, axis)

    def stride(self, axis: str) -> int:
        """Return the difference between the rank numbers of neighbours on an axis."""
        return prod(self.size(each) for each in self.axes[self.axes.index(axis) + 1 :])


def grids(degrees: Degrees, width: int) -> list[str]:
    """Return the lines of text grids of the ranks. Slow axes run down and across; a cell holds
    tensor-parallel ranks.

    Every rank is in one cell of the first grid. On large meshes its cells are blocks of the same
    shape, and a second grid shows the first block.
    """
    return _grids(View(degrees, AXES, "Ranks"), width)


def expert_grids(degrees: Degrees, width: int) -> list[str]:
    """Return the same of the ranks as experts are spread over them; a cell holds ranks of ep."""
    return _grids(View(degrees, SPARSE_AXES, "The same ranks for experts"), width)


def _grids(view: View, width: int) -> list[str]:
    split = [axis for axis in view.axes[:-1] if view.size(axis) > 1]
    num_rows = prod(view.size(axis) for axis in split[:-1])
    if len(split) <= 2 or num_rows <= MAX_ROWS:
        return _grid(view, split, width, view.title, MAX_ROWS)
    return [
        *_grid(view, split[:2], width, "Blocks of ranks", MAX_BLOCK_ROWS),
        *_grid(
            view, split[2:], width, "The first block; the other blocks look alike", MAX_BLOCK_ROWS
        ),
    ]


def _grid(view: View, axes: list[str], width: int, title: str, most: int) -> list[str]:
    """Return a grid of the ranks at coordinate 0 of all slower axes: the last of `axes` across, the
    others down.
    """
    size = view.stride(axes[-1]) if axes else view.degrees.num_ranks
    down = axes[:-1]
    across = axes[-1:]
    places: list[MeshCoordinates | None] = list(product(*(range(view.size(axis)) for axis in down)))
    places = [None if index is None else places[index] for index in select_shown(len(places), most)]
    labels = _labels(down, across, places)
    num_columns = view.size(across[0]) if across else 1
    last = tuple(view.size(axis) - 1 for axis in down)
    cell_width = max(3, len(_cell(view, axes, last, num_columns - 1, size)))
    columns = select_shown(num_columns, max(3, (width - len(labels[0])) // (cell_width + 2)))
    rows = [["..." if column is None else str(column) for column in columns]] if across else []
    rows += [[_cell(view, axes, place, column, size) for column in columns] for place in places]
    inside = " x ".join(
        axis for axis in view.axes if view.stride(axis) < size and view.size(axis) > 1
    )
    lines = [
        label + "".join(f"  {cell:>{cell_width}}" for cell in row)
        for label, row in zip(labels if across else labels[1:], rows, strict=True)
    ]
    return [f"{title}, {inside} in a cell" if inside else title, *lines]


def _cell(
    view: View, axes: list[str], place: MeshCoordinates | None, column: int | None, size: int
) -> str:
    """Return the text of one cell, which holds `size` consecutive ranks."""
    if place is None or column is None:
        return "..."
    first = sum(at * view.stride(axis) for axis, at in zip(axes, (*place, column), strict=False))
    return rank_text(range(first, first + size))


def _labels(down: list[str], across: list[str], places: list[MeshCoordinates | None]) -> list[str]:
    """Return the labels of the header and of each row, padded to one length. A coordinate is shown
    where it changes.
    """
    widths = [
        max(len(f"{axis} {place[index]}") for place in places if place)
        for index, axis in enumerate(down)
    ]
    labels = []
    before: MeshCoordinates | None = None
    for place in places:
        parts = []
        for index, axis in enumerate(down):
            is_new = place is not None and (
                before is None or place[: index + 1] != before[: index + 1]
            )
            parts.append(
                (f"{axis} {place[index]}" if place and is_new else "").ljust(widths[index])
            )
        labels.append("  ".join(["", *parts]))
        before = place
    heads = "  " + "".join(across)
    length = max(map(len, [heads, *labels]))
    return [heads.rjust(length), *(label.ljust(length) for label in labels)]
