"""The canonical space: every parameter of the model, flattened, in one agreed order, whatever the mesh.

The flat vector is cut into parts at boundaries that depend on the model and the run config alone. Islands of
different shape agree on every index; a codec's blocks never depend on a mesh.

    names      | embed          | layers.0.wq | ...        | head      |
    flat       0 ........................................... num_elements
    parts      |   0   |   1   |   2   |   3   |   4   | ...       | last |

Names in groups (a fragment's, its fine tensors, its moments) lie together, and no part has names of two groups. A
round sends the groups of its fragment that it is the time for.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Literal, Protocol

MIN_PARTS = 16
"""A small model is cut finer than part_elements says, so that reducing it is shared by all islands."""


Kind = Literal["params", "exp_avg", "exp_avg_sq"]
"""Parameters, or the first or second moment of each that the inner optimizer keeps."""


class TensorSpec(Protocol):
    """A parameter's full name and global shape."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class HeldSlice(Protocol):
    """A rectangle of a parameter that a rank holds, the parameter seen as a matrix (shape[0], rest)."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> tuple[int, int]: ...
    @property
    def cols(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Group:
    """Names whose parts go together: of one fragment and kind, all fine (at least 8 bits an element) or none."""

    names: tuple[str, ...]
    fragment: int = 0
    is_fine: bool = False
    kind: Kind = "params"
    period: int = 1
    """Sent in every `period`-th round of the fragment."""


@dataclass(frozen=True)
class Part:
    """A contiguous range of the flat vector, sent at once."""

    index: int
    start: int
    stop: int
    fragment: int = 0
    is_fine: bool = False
    kind: Kind = "params"
    group: int = 0
    """Its number in the space."""

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def is_moment(self) -> bool:
        """Whether it is averaged as it is, by no outer optimizer."""
        return self.kind != "params"


@dataclass(frozen=True)
class Piece:
    """Where a part and a held slice overlap: a rectangle of the slice, and its place in the part.

    Row i of the rectangle lies at `offset + i * stride` of the part.
    """

    part: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    offset: int
    stride: int

    @property
    def num_elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])


class Space:
    """The flat vector of `specs`, cut into parts of at most `part_elements`, at multiples of `block_elements`.

    `groups` hold every name once; None: all names are one group, in the order of `specs`.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        part_elements: int,
        block_elements: int = 1,
        groups: Sequence[Group] | None = None,
    ) -> None:
        self.groups = [Group(tuple(spec.name for spec in specs))] if groups is None else list(groups)
        shapes = {spec.name: tuple(spec.shape) for spec in specs}
        self.names = [name for group in self.groups for name in group.names]
        assert sorted(self.names) == sorted(shapes), "groups hold every name once"
        self.shapes = {name: shapes[name] for name in self.names}
        self._starts = [0, *accumulate(prod(shapes[name]) for name in self.names)]
        self.offsets = dict(zip(self.names, self._starts, strict=False))
        self.num_elements = self._starts[-1]
        self.parts: list[Part] = []
        for number, group in enumerate(self.groups):
            start = self.num_elements if not group.names else self.offsets[group.names[0]]
            stop = start + sum(prod(shapes[name]) for name in group.names)
            step = part_length(stop - start, part_elements, block_elements)
            for a in range(start, stop, step):
                bounds = len(self.parts), a, min(a + step, stop)
                self.parts.append(Part(*bounds, group.fragment, group.is_fine, group.kind, number))
        self._bounds = [part.start for part in self.parts]

    @property
    def fingerprint(self) -> str:
        """Hex digest of names, shapes and cuts: equal on islands whose parts mean the same."""
        cuts = [(part.start, part.fragment, part.is_fine, self.groups[part.group].period) for part in self.parts]
        text = repr(([(name, self.shapes[name]) for name in self.names], cuts))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def num_fragments(self) -> int:
        return max((group.fragment for group in self.groups), default=0) + 1

    @cached_property
    def parts_of(self) -> list[list[int]]:
        """The parts of each group."""
        found: list[list[int]] = [[] for _ in self.groups]
        for part in self.parts:
            found[part.group].append(part.index)
        return found

    def fragment_of(self, round_number: int) -> int:
        """The fragment that a round sends: each in its turn."""
        return round_number % self.num_fragments

    def sends(self, round_number: int, group: int) -> bool:
        """Whether a round sends the group: it is of the round's fragment, and its period has come around."""
        cycle, fragment = divmod(round_number, self.num_fragments)
        return self.groups[group].fragment == fragment and (cycle + 1) % self.groups[group].period == 0

    def sent_in(self, round_number: int) -> list[int]:
        """The groups that a round sends."""
        return [group for group in range(len(self.groups)) if self.sends(round_number, group)]

    @cached_property
    def param_groups(self) -> list[int]:
        """The groups that are the model itself."""
        return [number for number, group in enumerate(self.groups) if group.kind == "params"]

    def name_at(self, index: int) -> str:
        """The parameter that element `index` of the flat vector belongs to."""
        return self.names[bisect_right(self._starts, index) - 1]

    def pieces(self, held: HeldSlice) -> Iterator[Piece]:
        """Every overlap of a held slice with a part, in part order; rows and cols count from the slice's corner."""
        num_cols = matrix_cols(self.shapes[held.name])
        base = self.offsets[held.name]
        if held.rows[0] >= held.rows[1] or held.cols[0] >= held.cols[1]:
            return
        first = base + held.rows[0] * num_cols + held.cols[0]
        last = base + (held.rows[1] - 1) * num_cols + held.cols[1] - 1
        for part in self._parts_over(first, last):
            for rows, cols in rectangles(part.start - base, part.stop - base, self.shapes[held.name]):
                r0, r1 = max(rows[0], held.rows[0]), min(rows[1], held.rows[1])
                c0, c1 = max(cols[0], held.cols[0]), min(cols[1], held.cols[1])
                if r0 < r1 and c0 < c1:
                    yield Piece(
                        part=part.index,
                        rows=(r0 - held.rows[0], r1 - held.rows[0]),
                        cols=(c0 - held.cols[0], c1 - held.cols[0]),
                        offset=base + r0 * num_cols + c0 - part.start,
                        stride=num_cols,
                    )

    def _parts_over(self, first: int, last: int) -> list[Part]:
        return self.parts[bisect_right(self._bounds, first) - 1 : bisect_right(self._bounds, last)]


def part_length(num_elements: int, part_elements: int, block_elements: int) -> int:
    """Elements of every part but the last: a multiple of the codec's block, which is the least it can be."""
    wanted = min(part_elements, -(-num_elements // MIN_PARTS))
    return max(wanted // block_elements, 1) * block_elements


def matrix_cols(shape: tuple[int, ...]) -> int:
    """Columns of a parameter seen as a matrix (shape[0], rest)."""
    return prod(shape[1:])


def rectangles(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The range [start, stop) of a flattened parameter as at most three (rows, cols) rectangles, in order.

    shape (4, 5), range [3, 17):   . . . # #     first: row 0, cols 3-5
                                   # # # # #     full:  rows 1-3
                                   # # # # #
                                   # # . . .     last:  row 3, cols 0-2
    """
    cols = matrix_cols(shape)
    start, stop = max(start, 0), min(stop, prod(shape))
    if start >= stop:
        return
    row, col = divmod(start, cols)
    if col:
        end = min(cols, col + stop - start)
        yield (row, row + 1), (col, end)
        start += end - col
        row += 1
    full = (stop - start) // cols
    if full:
        yield (row, row + full), (0, cols)
        start += full * cols
        row += full
    if start < stop:
        yield (row, row + 1), (0, stop - start)
