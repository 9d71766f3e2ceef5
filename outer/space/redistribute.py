"""Between the ranks of one island: from slices, as the mesh holds them, to parts, as the outer loop wants them.

Each part has one carrier rank, the one that holds most of it. `gather` brings every part of the local params to
its carrier; `scatter` brings new values from the carriers to every rank that holds them, replicas included.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Protocol

import torch

from outer.errors import InputError
from outer.space import HeldSlice, Piece, Space, matrix_cols
from outer.team import Team


class Params(Protocol):
    """What an island's rank offers of its local params: `specs` are the model's, `slices` may be of moments, too."""

    @property
    def specs(self) -> Sequence: ...
    @property
    def slices(self) -> Sequence[HeldSlice]: ...
    def read(self, index: int) -> torch.Tensor: ...
    def write(self, index: int, values: torch.Tensor) -> None: ...


Rectangle = tuple[str, tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Move:
    """A piece on its way: from (or to) slice `slice_index` of this rank, or None on the carrier's side."""

    slice_index: int | None
    piece: Piece


Moves = list[list[Move]]
"""By the other rank."""


class Exchange:
    """The moves of one island, planned once. Every rank of the island must build it and call each method."""

    def __init__(self, space: Space, params: Params, team: Team) -> None:
        self._space, self._params, self._team = space, params, team
        held = team.gather([(s.name, s.rows, s.cols) for s in params.slices])
        holders = holders_of(held)
        check_coverage(space, holders)
        self.carriers = assign_carriers(space, holders, team.num_ranks)
        """The carrier rank of each part, the same list on every rank."""
        self.carried = [p.index for p in space.parts if self.carriers[p.index] == team.rank]
        """The parts this rank carries."""
        self._own_index = {(s.name, s.rows, s.cols): i for i, s in enumerate(params.slices)}
        self._gathers = self._plan(holders, to_all_holders=False)
        self._scatters = [(sends, receives) for receives, sends in self._plan(holders, to_all_holders=True)]

    def gather(self, groups: Sequence[int] | None = None) -> dict[int, torch.Tensor]:
        """The parts of the local params that this rank carries, 1-D fp32 on the CPU, freshly allocated.

        Of these groups, or None: of all.
        """
        parts: dict[int, torch.Tensor] = {}
        for number in self._numbers(groups):
            parts |= self._gather(number)
        return parts

    def scatter(self, parts: Mapping[int, torch.Tensor], groups: Sequence[int] | None = None, mix: float = 0.0) -> None:
        """Write carried parts into the local params of every rank that holds a slice of them.

        local = mix x local + (1 - mix) x part. Of these groups, or None: of all; `parts` has all that is carried of
        them.
        """
        for number in self._numbers(groups):
            self._scatter(parts, number, mix)

    def _numbers(self, groups: Sequence[int] | None) -> Sequence[int]:
        return range(len(self._gathers)) if groups is None else groups

    def _gather(self, group: int) -> dict[int, torch.Tensor]:
        sends, receives = self._gathers[group]
        parts = {
            i: torch.empty(self._space.parts[i].num_elements)
            for i in self._space.parts_of[group]
            if self.carriers[i] == self._team.rank
        }
        # Each slice once: a read copies all of it when the params live on a GPU.
        slices = {i: self._params.read(i) for i in {_own(m) for moves in sends for m in moves}}
        outgoing = [[_rectangle(slices[_own(m)], m.piece) for m in moves] for moves in sends]
        incoming = [[_part_view(parts, m) for m in moves] for moves in receives]
        self._team.exchange(outgoing, incoming)
        return parts

    def _scatter(self, parts: Mapping[int, torch.Tensor], group: int, mix: float) -> None:
        sends, receives = self._scatters[group]
        held = {_own(m) for moves in receives for m in moves}
        buffers = {i: torch.empty(*_rows_cols(self._params.slices[i])) for i in sorted(held)}
        outgoing = [[_part_view(parts, m) for m in moves] for moves in sends]
        incoming = [[_rectangle(buffers[_own(m)], m.piece) for m in moves] for moves in receives]
        self._team.exchange(outgoing, incoming)
        for index, values in buffers.items():
            if mix:
                # Two roundings, no fused multiply-add: replicas on other machines find the same.
                values = values * (1 - mix) + self._params.read(index) * mix
            self._params.write(index, values)

    def _plan(self, holders: dict[Rectangle, list[int]], *, to_all_holders: bool) -> list[tuple[Moves, Moves]]:
        """By group, moves between this rank's slices and the carriers, then between its parts and the holders.

        Both are by the other rank, in an order that all ranks share. A slice is of one name, so of one group.
        """
        ranks = range(self._team.num_ranks)
        found: list[tuple[Moves, Moves]] = [([[] for _ in ranks], [[] for _ in ranks]) for _ in self._space.groups]
        for rectangle, holding in holders.items():
            for piece in self._space.pieces(_Held(*rectangle)):
                slice_side, part_side = found[self._space.parts[piece.part].group]
                carrier = self.carriers[piece.part]
                for rank in holding if to_all_holders else [_source(holding, carrier)]:
                    if rank == self._team.rank:
                        slice_side[carrier].append(Move(self._own_index[rectangle], piece))
                    if carrier == self._team.rank:
                        part_side[rank].append(Move(None, piece))
        return found


@dataclass(frozen=True)
class _Held:
    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]


def holders_of(held: Sequence[Sequence[Rectangle]]) -> dict[Rectangle, list[int]]:
    """The ranks that hold each rectangle, in an order that every rank finds."""
    holders: dict[Rectangle, list[int]] = {}
    for rank, rectangles in enumerate(held):
        for rectangle in rectangles:
            holders.setdefault(rectangle, []).append(rank)
    return dict(sorted(holders.items()))


def check_coverage(space: Space, rectangles: Collection[Rectangle]) -> None:
    """Raise InputError unless the rectangles make up the model exactly once."""
    areas: Counter[str] = Counter()
    corners: dict[str, set[tuple[int, int]]] = {name: set() for name in space.names}
    for name, rows, cols in rectangles:
        if name not in corners:
            raise InputError(f"the island's ranks hold {name!r}, which the model does not have")
        if area := (rows[1] - rows[0]) * (cols[1] - cols[0]):
            areas[name] += area
            corners[name] ^= set(product(rows, cols))
    for name, shape in space.shapes.items():
        _check_tiling(name, (prod(shape[:1]), matrix_cols(shape)), areas[name], corners[name])


def _check_tiling(name: str, size: tuple[int, int], area: int, corners: set[tuple[int, int]]) -> None:
    """`corners`: the points that are a corner of an odd number of the rectangles held."""
    # Those of the matrix alone: each element is held an odd number of times. With the area right too: once.
    num_elements = size[0] * size[1]
    outer_corners = set(product((0, size[0]), (0, size[1]))) if num_elements else set()
    if area != num_elements or corners != outer_corners:
        raise InputError(
            f"the island's ranks do not hold {name!r} exactly once: it has {num_elements} elements, their slices "
            f"{area}; the mesh must split it into slices that do not overlap, replicas as equal ones"
        )


def assign_carriers(space: Space, holders: Mapping[Rectangle, Sequence[int]], num_ranks: int) -> list[int]:
    """The carrier of each part: the rank that holds most of it; among equals, the one that carries least so far."""
    held = [[0] * num_ranks for _ in space.parts]
    for rectangle, ranks in holders.items():
        for piece in space.pieces(_Held(*rectangle)):
            for rank in ranks:
                held[piece.part][rank] += piece.num_elements
    load, carriers = [0] * num_ranks, []
    for part, elements in zip(space.parts, held, strict=True):
        carrier = max(range(num_ranks), key=lambda rank: (elements[rank], -load[rank], -rank))
        load[carrier] += part.num_elements
        carriers.append(carrier)
    return carriers


def _source(ranks: Sequence[int], carrier: int) -> int:
    """Who sends a replicated slice to its carrier: the carrier itself if it can."""
    return carrier if carrier in ranks else ranks[carrier % len(ranks)]


def _own(move: Move) -> int:
    assert move.slice_index is not None, "this move has no slice on this rank"
    return move.slice_index


def _rows_cols(held: HeldSlice) -> tuple[int, int]:
    return held.rows[1] - held.rows[0], held.cols[1] - held.cols[0]


def _rectangle(matrix: torch.Tensor, piece: Piece) -> torch.Tensor:
    return matrix[slice(*piece.rows), slice(*piece.cols)]


def _part_view(parts: Mapping[int, torch.Tensor], move: Move) -> torch.Tensor:
    piece = move.piece
    size = (piece.rows[1] - piece.rows[0], piece.cols[1] - piece.cols[0])
    return parts[piece.part].as_strided(size, (piece.stride, 1), parts[piece.part].storage_offset() + piece.offset)
