"""Where an island's ranks lie on its mesh and which of them talk, as plain text. No torch here."""

from collections.abc import Sequence
from itertools import product
from math import prod

from inner.mesh import AXES, Degrees

MAX_ROWS = 8
"""Of one grid that shows every rank; larger meshes get a grid of blocks, and one of the first block."""
MAX_BLOCK_ROWS = 4

Place = tuple[int, ...]
"""Coordinates on the axes of a grid's rows."""


def groups(degrees: Degrees, *axes: str) -> list[list[int]]:
    """The ranks that differ on `axes` alone, group by group, in the order of their first ranks."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(degrees.num_ranks):
        place = degrees.coordinates(rank)
        found.setdefault(tuple(at for axis, at in place.items() if axis not in axes), []).append(rank)
    return list(found.values())


def rank_text(ranks: Sequence[int]) -> str:
    """`0-7` for neighbours, else `0 2 4 6`; of more than four `0 16 .. 240`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
    return " ".join(map(str, ranks))


def groups_text(groups: Sequence[Sequence[int]], width: int) -> str:
    """As many of the first groups as fit into `width`, and `...` for the rest."""
    texts = [rank_text(group) for group in groups]
    for count in range(len(texts), 0, -1):
        text = " | ".join(texts[:count] + ["..."] * (count < len(texts)))
        if len(text) <= width:
            return text
    return texts[0]


def shown(count: int, most: int) -> list[int | None]:
    """Which of `count` things to show, at most `most` of them: the first ones, None for what is left out, the last."""
    if count <= most:
        return list(range(count))
    return [*range(max(1, most - 2)), None, count - 1]


def grids(degrees: Degrees, width: int) -> list[str]:
    """Lines that show where each rank lies: slow axes down and across, tensor-parallel neighbours in one cell.

    Every rank is in one cell of the first grid. When ranks are many, its cells are blocks, all alike, and a second
    grid shows the first block.
    """
    split = [axis for axis in AXES if axis != "tp" and getattr(degrees, axis) > 1]
    num_rows = prod(getattr(degrees, axis) for axis in split[:-1])
    if len(split) <= 2 or num_rows <= MAX_ROWS:
        return _grid(degrees, split, width, "Ranks", MAX_ROWS)
    return [
        *_grid(degrees, split[:2], width, "Blocks of ranks", MAX_BLOCK_ROWS),
        *_grid(degrees, split[2:], width, "The first block; the others are alike", MAX_BLOCK_ROWS),
    ]


def _grid(degrees: Degrees, axes: list[str], width: int, title: str, most: int) -> list[str]:
    """The ranks at coordinate 0 of all slower axes: the last of `axes` across, the others down, in `most` rows."""
    size = _stride(degrees, axes[-1]) if axes else degrees.num_ranks
    down, across = axes[:-1], axes[-1:]
    places: list[Place | None] = list(product(*(range(getattr(degrees, axis)) for axis in down)))
    places = [None if index is None else places[index] for index in shown(len(places), most)]
    labels = _labels(down, across, places)
    num_columns = getattr(degrees, across[0]) if across else 1
    last = tuple(getattr(degrees, axis) - 1 for axis in down)
    cell_width = max(3, len(_cell(degrees, axes, last, num_columns - 1, size)))
    columns = shown(num_columns, max(3, (width - len(labels[0])) // (cell_width + 2)))
    rows = [["..." if column is None else str(column) for column in columns]] if across else []
    rows += [[_cell(degrees, axes, place, column, size) for column in columns] for place in places]
    inside = " x ".join(axis for axis in AXES if _stride(degrees, axis) < size and getattr(degrees, axis) > 1)
    lines = [
        label + "".join(f"  {cell:>{cell_width}}" for cell in row)
        for label, row in zip(labels if across else labels[1:], rows, strict=True)
    ]
    return [f"{title}, {inside} in a cell" if inside else title, *lines]


def _cell(degrees: Degrees, axes: list[str], place: Place | None, column: int | None, size: int) -> str:
    """The ranks of one cell: `size` neighbours."""
    if place is None or column is None:
        return "..."
    first = sum(at * _stride(degrees, axis) for axis, at in zip(axes, (*place, column), strict=False))
    return rank_text(range(first, first + size))


def _stride(degrees: Degrees, axis: str) -> int:
    """How far neighbours on an axis are apart."""
    return prod(degrees.sizes[AXES.index(axis) + 1 :])


def _labels(down: list[str], across: list[str], places: list[Place | None]) -> list[str]:
    """Of the heads, then of each row, all of the same length; a coordinate is named where it changes."""
    widths = [max(len(f"{axis} {place[index]}") for place in places if place) for index, axis in enumerate(down)]
    labels = []
    before: Place | None = None
    for place in places:
        parts = []
        for index, axis in enumerate(down):
            is_new = place is not None and (before is None or place[: index + 1] != before[: index + 1])
            parts.append((f"{axis} {place[index]}" if place and is_new else "").ljust(widths[index]))
        labels.append("  ".join(["", *parts]))
        before = place
    heads = "  " + "".join(across)
    length = max(map(len, [heads, *labels]))
    return [heads.rjust(length), *(label.ljust(length) for label in labels)]
