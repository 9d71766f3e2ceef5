"""Redistribute local params among the ranks of one island, from slices (as the mesh holds them) to parts, and back.

Each part has one carrier, the rank that holds most of it. `gather` sends every part of the local params to its
carrier; `scatter` sends new values from the carriers to every rank that holds them, replicas included.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple, Protocol

import torch

from outer.errors import InputError
from outer.space.buffers import BUFFERS
from outer.space.layout import Piece, SliceBounds, Space, matrix_cols
from outer.space.ranks import RankGroup


class Params(Protocol):
    """Local params of one rank. `specs` are the model's parameters; `slices` may also include moments."""

    @property
    def specs(self) -> Sequence: ...
    @property
    def slices(self) -> Sequence[SliceBounds]: ...
    def read(self, index: int) -> torch.Tensor: ...
    def write(self, index: int, values: torch.Tensor) -> None: ...
    def live(self, index: int) -> torch.Tensor | None: ...


class Rectangle(NamedTuple):
    """A slice that some rank holds, by its bounds."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]


@dataclass(frozen=True)
class Move:
    """One piece to copy from or to slice `slice_index` of this rank; the index is None on the carrier's side."""

    slice_index: int | None
    piece: Piece


Moves = list[list[Move]]
"""The moves to or from each rank, by rank."""


class Redistribution:
    """The moves of one island, planned once. Collective: every rank builds it and calls each method together."""

    def __init__(self, space: Space, params: Params, ranks: RankGroup) -> None:
        self._space, self._params, self._ranks = space, params, ranks
        holders = find_holders(ranks.gather([(s.name, s.rows, s.cols) for s in params.slices]))
        check_coverage(space, holders)
        self.carriers = assign_carriers(space, holders, ranks.num_ranks)
        """The carrier of each part, the same list on every rank."""
        self.own_parts = [p.index for p in space.parts if self.carriers[p.index] == ranks.rank]
        """Indices of the parts that this rank carries."""
        self._slice_index = {(s.name, s.rows, s.cols): i for i, s in enumerate(params.slices)}
        self._gathers = self._plan(holders, to_all_holders=False)
        self._scatters = [(sends, receives) for receives, sends in self._plan(holders, to_all_holders=True)]

    def gather(self, part_groups: Sequence[int] | None = None) -> dict[int, torch.Tensor]:
        """The parts of the local params that this rank carries, 1-D fp32 on the CPU, in memory of their own.

        Limited to these part groups; None gathers all.
        """
        parts: dict[int, torch.Tensor] = {}
        for number in self._select(part_groups):
            parts |= self._gather(number)
        return parts

    def scatter(
        self, parts: Mapping[int, torch.Tensor], part_groups: Sequence[int] | None = None, mix: float = 0.0
    ) -> None:
        """Write parts into the local params of every rank that holds a slice of them.

        local = mix x local + (1 - mix) x part. Limited to these part groups; None scatters all. `parts` must contain
        every part of them that this rank carries.
        """
        for number in self._select(part_groups):
            self._scatter(parts, number, mix)

    def _select(self, part_groups: Sequence[int] | None) -> Sequence[int]:
        return range(len(self._gathers)) if part_groups is None else part_groups

    def _gather(self, part_group: int) -> dict[int, torch.Tensor]:
        sends, receives = self._gathers[part_group]
        parts = {
            i: BUFFERS.floats(self._space.parts[i].num_elements)
            for i in self._space.parts_in[part_group]
            if self.carriers[i] == self._ranks.rank
        }
        # Read each slice once: with params on a GPU a read copies the whole slice.
        slices = {i: self._params.read(i) for i in {_slice_index(m) for moves in sends for m in moves}}
        outgoing = [[_rectangle_view(slices[_slice_index(m)], m.piece) for m in moves] for moves in sends]
        incoming = [[_part_view(parts, m.piece) for m in moves] for moves in receives]
        self._ranks.exchange(outgoing, incoming)
        return parts

    def _scatter(self, parts: Mapping[int, torch.Tensor], part_group: int, mix: float) -> None:
        sends, receives = self._scatters[part_group]
        indices = {_slice_index(m) for moves in receives for m in moves}
        # Params on the CPU are written where they lie.
        live = {i: None if mix else self._params.live(i) for i in sorted(indices)}
        buffers = {i: self._buffer(i) if values is None else values for i, values in live.items()}
        outgoing = [[_part_view(parts, m.piece) for m in moves] for moves in sends]
        incoming = [[_rectangle_view(buffers[_slice_index(m)], m.piece) for m in moves] for moves in receives]
        self._ranks.exchange(outgoing, incoming)
        for index in [i for i in buffers if live[i] is None]:
            values = buffers[index]
            if mix:
                # Products and sum round separately, without a fused multiply-add, so that replicas on other machines
                # get the same bits.
                values = values * (1 - mix) + self._params.read(index) * mix
            self._params.write(index, values)

    def _buffer(self, slice_index: int) -> torch.Tensor:
        num_rows, num_cols = _shape(self._params.slices[slice_index])
        return BUFFERS.floats(num_rows * num_cols).view(num_rows, num_cols)

    def _plan(self, holders: dict[Rectangle, list[int]], *, to_all_holders: bool) -> list[tuple[Moves, Moves]]:
        """For each part group, moves between this rank's slices and the carriers, and between its parts and holders.

        Moves are listed by the other rank, in an order that all ranks share.
        """
        ranks = range(self._ranks.num_ranks)
        plans: list[tuple[Moves, Moves]] = [([[] for _ in ranks], [[] for _ in ranks]) for _ in self._space.part_groups]
        for rectangle, holding_ranks in holders.items():
            for piece in self._space.pieces(rectangle):
                slice_moves, part_moves = plans[self._space.parts[piece.part].part_group]
                carrier = self.carriers[piece.part]
                for rank in holding_ranks if to_all_holders else [_source(holding_ranks, carrier)]:
                    if rank == self._ranks.rank:
                        slice_moves[carrier].append(Move(self._slice_index[rectangle], piece))
                    if carrier == self._ranks.rank:
                        part_moves[rank].append(Move(None, piece))
        return plans


def find_holders(bounds_by_rank: Sequence[Sequence[tuple]]) -> dict[Rectangle, list[int]]:
    """The ranks that hold each rectangle, ordered alike on all ranks, from the bounds of every rank's slices."""
    holders: dict[Rectangle, list[int]] = {}
    for rank, slices in enumerate(bounds_by_rank):
        for bounds in slices:
            holders.setdefault(Rectangle(*bounds), []).append(rank)
    return dict(sorted(holders.items()))


def check_coverage(space: Space, rectangles: Collection[Rectangle]) -> None:
    """Raise InputError unless the rectangles cover the model exactly once."""
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
    """Check one matrix. `corners` are the points that are a corner of an odd number of rectangles."""
    # If these are just the matrix's own four corners, every element is covered an odd number of times; if the area
    # matches as well, every element is covered once.
    num_elements = size[0] * size[1]
    outer_corners = set(product((0, size[0]), (0, size[1]))) if num_elements else set()
    if area != num_elements or corners != outer_corners:
        raise InputError(
            f"the island's ranks do not hold {name!r} exactly once: it has {num_elements} elements, their slices "
            f"{area}; the mesh must split it into slices that do not overlap, replicas as equal ones"
        )


def assign_carriers(space: Space, holders: Mapping[Rectangle, Sequence[int]], num_ranks: int) -> list[int]:
    """The carrier of each part: the rank that holds most of it, and on a tie the one with the least load so far."""
    elements_held = [[0] * num_ranks for _ in space.parts]
    for rectangle, ranks in holders.items():
        for piece in space.pieces(rectangle):
            for rank in ranks:
                elements_held[piece.part][rank] += piece.num_elements
    load, carriers = [0] * num_ranks, []
    for part, elements in zip(space.parts, elements_held, strict=True):
        carrier = max(range(num_ranks), key=lambda rank: (elements[rank], -load[rank], -rank))
        load[carrier] += part.num_elements
        carriers.append(carrier)
    return carriers


def _source(ranks: Sequence[int], carrier: int) -> int:
    """The holder that sends a replicated slice to the carrier: the carrier itself if it holds the slice."""
    return carrier if carrier in ranks else ranks[carrier % len(ranks)]


def _slice_index(move: Move) -> int:
    assert move.slice_index is not None, "this move has no slice on this rank"
    return move.slice_index


def _shape(bounds: SliceBounds | Piece) -> tuple[int, int]:
    return bounds.rows[1] - bounds.rows[0], bounds.cols[1] - bounds.cols[0]


def _rectangle_view(matrix: torch.Tensor, piece: Piece) -> torch.Tensor:
    return matrix[slice(*piece.rows), slice(*piece.cols)]


def _part_view(parts: Mapping[int, torch.Tensor], piece: Piece) -> torch.Tensor:
    size = _shape(piece)
    return parts[piece.part].as_strided(size, (piece.stride, 1), parts[piece.part].storage_offset() + piece.offset)
