"""The canonical space: all parameters of the model, flattened in one order that does not depend on
the mesh.

The flat vector is cut into parts at boundaries that depend only on the model and the run config.
Islands with different meshes therefore agree on every index, and the blocks of a codec never depend
on a mesh.

    names      | embed          | layers.0.wq | ...        | head      |
    flat       0 ........................................... num_elements
    parts      |   0   |   1   |   2   |   3   |   4   | ...       | last |

A part group holds the names that are sent together: the tensors of a fragment, its fine tensors,
its moments, or its buffers. The names of a part group are adjacent, and no part crosses two of
them. A round sends the part groups of its fragment whose period has come around. No round sends
buffers that only joiners take.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Literal, Protocol

from outer.space.part_sizes import BUFFER_PART_ELEMENTS, equal_length, part_length

TensorKind = Literal["params", "exp_avg", "exp_avg_sq", "buffer", "donor_buffer"]
"""Parameters; the inner optimizer's first or second moments of the parameters; buffers of the model
that rounds average; buffers that are each island's own, and of which only a joiner takes a donor's.
"""


class TensorSpec(Protocol):
    """A parameter's full name and global shape."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class SliceBounds(Protocol):
    """Bounds of the rectangle of a parameter, as a matrix (matrix_shape), that a rank holds."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> tuple[int, int]: ...
    @property
    def cols(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class PartGroup:
    """Names that are sent together: one fragment, one kind, and either only fine tensors (at
    least 8 bits per element) or none.
    """

    names: tuple[str, ...]
    fragment: int = 0
    is_fine: bool = False
    kind: TensorKind = "params"
    period: int = 1
    """The group is sent in every `period`-th round of the fragment."""
    is_experts: bool = False
    """Whether these are experts that are sent or weighted otherwise than the rest of the model."""
    count: int | None = None
    """Place of the islands' weights among the counts of their ready messages; None: the weights are
    tokens."""

    @property
    def is_buffers(self) -> bool:
        return self.kind in ("buffer", "donor_buffer")


@dataclass(frozen=True)
class Part:
    """A contiguous range of the flat vector, encoded and sent as one payload."""

    index: int
    start: int
    stop: int
    fragment: int = 0
    is_fine: bool = False
    kind: TensorKind = "params"
    part_group: int = 0
    """Index of the part's group in `Space.part_groups`."""
    is_experts: bool = False
    """See `PartGroup.is_experts`."""
    count: int | None = None
    """See `PartGroup.count`."""

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def is_replaced(self) -> bool:
        """Whether the part's mean replaces the old values directly, without the outer optimizer."""
        return self.kind != "params"

    @property
    def is_committed(self) -> bool:
        """Whether the part is the same on all islands, so that it is in the digest."""
        return self.kind != "donor_buffer"


@dataclass(frozen=True)
class Piece:
    """The overlap of a part with a rank's slice: a rectangle of the slice, and its position in the
    part.

    Row i of the rectangle starts at `offset + i * stride` of the part.
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
    """The flat vector of `specs`, cut into parts of at most `part_elements`, at multiples of
    `block_elements`.

    Each part group has enough parts for `num_islands` to reduce equally many: see `part_length`.

    `part_groups` contain every name once. None puts all names into one part group, in the order of
    `specs`.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        part_elements: int,
        block_elements: int = 1,
        part_groups: Sequence[PartGroup] | None = None,
        num_islands: int = 1,
    ) -> None:
        everything = PartGroup(tuple(spec.name for spec in specs))
        self.part_groups = [everything] if part_groups is None else list(part_groups)
        shapes = {spec.name: tuple(spec.shape) for spec in specs}
        self.names = [name for group in self.part_groups for name in group.names]
        assert sorted(self.names) == sorted(shapes), "part groups contain every name once"
        self.shapes = {name: shapes[name] for name in self.names}
        self._starts = [0, *accumulate(prod(shapes[name]) for name in self.names)]
        self.offsets = dict(zip(self.names, self._starts, strict=False))
        self.name_index = {name: index for index, name in enumerate(self.names)}
        self.num_elements = self._starts[-1]
        self.parts: list[Part] = []
        for number, group in enumerate(self.part_groups):
            start = self.num_elements if not group.names else self.offsets[group.names[0]]
            stop = start + sum(prod(shapes[name]) for name in group.names)
            block = min(BUFFER_PART_ELEMENTS, part_elements) if group.is_buffers else block_elements
            length = stop - start
            if group.count is not None:
                # The many groups of counted experts spread over all reducers without being cut.
                step = equal_length(length, part_elements, block)
            else:
                step = part_length(length, part_elements, block, num_islands)
            of_group = (
                group.fragment,
                group.is_fine,
                group.kind,
                number,
                group.is_experts,
                group.count,
            )
            for a in range(start, stop, step):
                self.parts.append(Part(len(self.parts), a, min(a + step, stop), *of_group))
        self._bounds = [part.start for part in self.parts]

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of names, shapes and part boundaries. Islands have equal fingerprints if
        their parts have the same meaning.
        """
        periods = [group.period for group in self.part_groups]
        cuts = [
            (part.start, part.fragment, part.is_fine, periods[part.part_group])
            for part in self.parts
        ]
        text = repr(([(name, self.shapes[name]) for name in self.names], cuts))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def num_fragments(self) -> int:
        return max((group.fragment for group in self.part_groups), default=0) + 1

    @cached_property
    def parts_in(self) -> list[list[int]]:
        """Indices of the parts in each part group."""
        parts_in: list[list[int]] = [[] for _ in self.part_groups]
        for part in self.parts:
            parts_in[part.part_group].append(part.index)
        return parts_in

    def fragment_of(self, round_number: int) -> int:
        """Return the fragment that a round sends. Fragments take turns."""
        return round_number % self.num_fragments

    def content_of(self, round_number: int) -> int:
        """Return a number that is equal for rounds that send the same parameters: the fragment, and
        whether its experts are sent if they have part groups of their own.
        """
        fragment = self.fragment_of(round_number)
        has_experts = any(
            self.part_groups[group].is_experts for group in self.part_groups_in(round_number)
        )
        return fragment + self.num_fragments * has_experts

    def sends(self, round_number: int, part_group: int) -> bool:
        """Return whether a round sends the part group: it belongs to the round's fragment, and
        this is one of its `period`-th cycles.
        """
        cycle, fragment = divmod(round_number, self.num_fragments)
        group = self.part_groups[part_group]
        is_due = group.fragment == fragment and (cycle + 1) % group.period == 0
        return is_due and group.kind != "donor_buffer"

    def part_groups_in(self, round_number: int) -> list[int]:
        """Return the indices of the part groups that a round sends."""
        return [
            number for number in range(len(self.part_groups)) if self.sends(round_number, number)
        ]

    @cached_property
    def model_part_groups(self) -> list[int]:
        """Indices of the part groups with which a model computes: its parameters and averaged
        buffers.
        """
        return [*self.part_groups_of("params"), *self.part_groups_of("buffer")]

    def part_groups_of(self, kind: TensorKind) -> list[int]:
        """Return the indices of the part groups of this kind."""
        return [number for number, group in enumerate(self.part_groups) if group.kind == kind]

    def name_at(self, index: int) -> str:
        """Return the name of the parameter to which element `index` of the flat vector belongs."""
        return self.names[bisect_right(self._starts, index) - 1]

    def names_in(self, part: Part) -> Iterator[tuple[str, int]]:
        """Yield the names of which the part has elements, each with their number."""
        first = bisect_right(self._starts, part.start) - 1
        for index in range(first, len(self.names)):
            overlap = min(self._starts[index + 1], part.stop) - max(self._starts[index], part.start)
            if overlap <= 0:
                return
            yield self.names[index], overlap

    def pieces(self, bounds: SliceBounds) -> Iterator[Piece]:
        """Yield every overlap of a slice with a part, in part order. Rows and columns count from
        the slice's corner.
        """
        num_cols = matrix_cols(self.shapes[bounds.name])
        base = self.offsets[bounds.name]
        if bounds.rows[0] >= bounds.rows[1] or bounds.cols[0] >= bounds.cols[1]:
            return
        first = base + bounds.rows[0] * num_cols + bounds.cols[0]
        last = base + (bounds.rows[1] - 1) * num_cols + bounds.cols[1] - 1
        for part in self._parts_over(first, last):
            yield from self.pieces_in(part, bounds)

    def pieces_in(self, part: Part, bounds: SliceBounds) -> Iterator[Piece]:
        """Yield the `pieces` of one part, at most three."""
        num_cols = matrix_cols(self.shapes[bounds.name])
        base = self.offsets[bounds.name]
        for rows, cols in rectangles(part.start - base, part.stop - base, self.shapes[bounds.name]):
            r0 = max(rows[0], bounds.rows[0])
            r1 = min(rows[1], bounds.rows[1])
            c0 = max(cols[0], bounds.cols[0])
            c1 = min(cols[1], bounds.cols[1])
            if r0 < r1 and c0 < c1:
                yield Piece(
                    part=part.index,
                    rows=(r0 - bounds.rows[0], r1 - bounds.rows[0]),
                    cols=(c0 - bounds.cols[0], c1 - bounds.cols[0]),
                    offset=base + r0 * num_cols + c0 - part.start,
                    stride=num_cols,
                )

    def _parts_over(self, first: int, last: int) -> list[Part]:
        return self.parts[bisect_right(self._bounds, first) - 1 : bisect_right(self._bounds, last)]


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a parameter seen as a matrix: (all dimensions but the last, the
    last), (n, 1) for a 1-D parameter, (1, 1) for a 0-d parameter.
    """
    return (prod(shape), 1) if len(shape) < 2 else (prod(shape[:-1]), shape[-1])


def matrix_cols(shape: tuple[int, ...]) -> int:
    """Return the number of columns of a parameter seen as a matrix."""
    return matrix_shape(shape)[1]


def rectangles(
    start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Split the range [start, stop) of a flattened parameter into at most three (rows, cols)
    rectangles, in order.

    shape (4, 5), range [3, 17):   . . . # #     first: row 0, cols 3-5
                                   # # # # #     full:  rows 1-3
                                   # # # # #
                                   # # . . .     last:  row 3, cols 0-2
    """
    cols = matrix_cols(shape)
    start = max(start, 0)
    stop = min(stop, prod(shape))
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
