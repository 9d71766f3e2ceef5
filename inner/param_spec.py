"""Names, shapes and slices of a model's parameters, without their values. No torch here."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from inner.expert_names import expert_place

Index = tuple[int | slice, ...]
"""Indexes a shard: it gives the view of the shard that a slice is."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model, fp32."""

    name: str
    shape: tuple[int, ...]
    has_moments: bool = True
    """Whether its moments are averaged if the run averages moments."""

    @property
    def expert(self) -> tuple[int, int] | None:
        """Layer and number of the expert to which the parameter belongs; None if all tokens use
        it.
        """
        return expert_place(self.name)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the parameter as a matrix: (product of all dimensions but the last,
        the last), (n, 1) for a 1-D parameter, (1, 1) for a 0-d parameter.
        """
        if len(self.shape) < 2:
            return math.prod(self.shape), 1
        return math.prod(self.shape[:-1]), self.shape[-1]


@dataclass(frozen=True)
class ParamSlice:
    """The half-open rectangle rows x cols of a parameter that this rank holds."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


class HeldRange(NamedTuple):
    """Indices first to end (excluded) of one dimension of a parameter, which a shard holds."""

    first: int
    end: int
    at: int
    """Index in the shard at which they begin."""

    @property
    def place(self) -> slice:
        return slice(self.at, self.at + self.end - self.first)


def cut_shard(
    spec: ParamSpec, held: Sequence[Sequence[HeldRange]]
) -> Iterator[tuple[ParamSlice, Index]]:
    """Yield the slices that a shard consists of, each with its index in the shard.

    `held`: for each dimension of the parameter the ranges that the shard holds. Every choice of one
    range per dimension is a box, and a box is one or several runs of whole rows or parts of rows.
    """
    for box in product(*held):
        if len(spec.shape) < 2:
            rows = (box[0].first, box[0].end) if box else (0, 1)
            yield ParamSlice(spec.name, rows, (0, 1)), tuple(each.place for each in box)
        else:
            yield from _cut_box(spec, box)


def _cut_box(spec: ParamSpec, box: Sequence[HeldRange]) -> Iterator[tuple[ParamSlice, Index]]:
    """Yield the runs of rows of a box of at least two dimensions.

    Rows are adjacent if the box holds all of the dimensions between `last` and the columns.
    """
    *_, columns = box
    partial = [
        dim for dim in range(1, len(box) - 1) if box[dim].end - box[dim].first < spec.shape[dim]
    ]
    last = max(partial, default=0)
    rows_per_index = math.prod(spec.shape[last + 1 : -1])
    for before in product(*(range(each.first, each.end) for each in box[:last])):
        number = 0
        for index, size in zip((*before, box[last].first), spec.shape, strict=False):
            number = number * size + index
        first = number * rows_per_index
        end = first + (box[last].end - box[last].first) * rows_per_index
        inside = [index - each.first + each.at for index, each in zip(before, box, strict=False)]
        places = [each.place for each in box[last:]]
        yield ParamSlice(spec.name, (first, end), (columns.first, columns.end)), (*inside, *places)
