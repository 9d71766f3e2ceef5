"""Redistribute local params among the ranks of one island, from slices (as the mesh holds them) to
parts, and back.

Each part has one carrier, a rank that holds a large share of it. `gather` sends every part of the
local params to its carrier; `scatter` sends new values from the carriers to every rank that holds
them, replicas included.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from outer.space.buffers import BUFFERS
from outer.space.carriers import Overlaps, assign_carriers, count_overlaps
from outer.space.holdings import Holdings, check_coverage, pack_slices
from outer.space.layout import Piece, SliceBounds, Space
from outer.space.ranks import RankGroup


class Params(Protocol):
    """Local params of one rank. `specs` are the model's parameters; `slices` may also include
    moments.
    """

    @property
    def specs(self) -> Sequence: ...
    @property
    def slices(self) -> Sequence[SliceBounds]: ...
    def read_all(self, indices: Iterable[int]) -> dict[int, torch.Tensor]: ...
    def write_all(self, values: Mapping[int, torch.Tensor]) -> None: ...
    def pinned(self, index: int) -> torch.Tensor | None: ...
    def live(self, index: int) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Move:
    """One piece to copy from or to slice `slice_index` of this rank; the index is None on the
    carrier's side.
    """

    slice_index: int | None
    piece: Piece


Moves = list[list[Move]]
"""The moves to or from each rank, by rank."""


class PartGroupMoves:
    """The pieces of one part group that a rank sends and receives. Both ranks of a move list it
    in the same order.
    """

    def __init__(self, num_ranks: int) -> None:
        self.sends: Moves = [[] for _ in range(num_ranks)]
        self.receives: Moves = [[] for _ in range(num_ranks)]


class Redistribution:
    """The moves of one island, planned once. Every rank builds it and calls each method together
    with the others.
    """

    def __init__(self, space: Space, params: Params, ranks: RankGroup) -> None:
        self._space = space
        self._params = params
        self._ranks = ranks
        holdings = Holdings(space, ranks.gather(pack_slices(params.slices)))
        check_coverage(space, holdings)
        overlaps = count_overlaps(space, holdings.rectangles)
        self.carriers = assign_carriers(space, holdings, overlaps, ranks.num_ranks)
        """The carrier of each part, the same list on every rank."""
        self.own_parts = [p.index for p in space.parts if self.carriers[p.index] == ranks.rank]
        """Indices of the parts that this rank carries."""
        self._gathers, self._scatters = (
            [PartGroupMoves(ranks.num_ranks) for _ in space.part_groups] for _ in range(2)
        )
        self._plan_slices(holdings)
        self._plan_parts(holdings, overlaps)

    def gather(self, part_groups: Sequence[int] | None = None) -> dict[int, torch.Tensor]:
        """Return the parts of the local params that this rank carries, 1-D fp32 on the CPU, in
        memory of their own.

        Limited to these part groups; None gathers all.
        """
        parts: dict[int, torch.Tensor] = {}
        for number in self._select(part_groups):
            parts |= self._gather(number)
        return parts

    def scatter(
        self,
        parts: Mapping[int, torch.Tensor],
        part_groups: Sequence[int] | None = None,
        mix: float = 0.0,
    ) -> None:
        """Write parts into the local params of every rank that holds a slice of them.

        local = mix x local + (1 - mix) x part. Limited to these part groups; None scatters all.
        `parts` must contain every part of these groups that this rank carries.
        """
        for number in self._select(part_groups):
            self._scatter(parts, number, mix)

    def _select(self, part_groups: Sequence[int] | None) -> Sequence[int]:
        return range(len(self._gathers)) if part_groups is None else part_groups

    def _gather(self, part_group: int) -> dict[int, torch.Tensor]:
        planned = self._gathers[part_group]
        parts = {
            i: BUFFERS.floats(self._space.parts[i].num_elements)
            for i in self._space.parts_in[part_group]
            if self.carriers[i] == self._ranks.rank
        }
        # Each slice is read once, all together: with params on a GPU a read copies whole slices and
        # waits for the copy.
        slices = self._params.read_all({_slice_index(m) for moves in planned.sends for m in moves})
        outgoing = [
            [_rectangle_view(slices[_slice_index(m)], m.piece) for m in moves]
            for moves in planned.sends
        ]
        incoming = [[_part_view(parts, m.piece) for m in moves] for moves in planned.receives]
        self._ranks.exchange(outgoing, incoming)
        return parts

    def _scatter(self, parts: Mapping[int, torch.Tensor], part_group: int, mix: float) -> None:
        planned = self._scatters[part_group]
        indices = {_slice_index(m) for moves in planned.receives for m in moves}
        # Params on the CPU are written in place.
        live = {i: None if mix else self._params.live(i) for i in sorted(indices)}
        buffers = {i: self._buffer(i) if values is None else values for i, values in live.items()}
        outgoing = [[_part_view(parts, m.piece) for m in moves] for moves in planned.sends]
        incoming = [
            [_rectangle_view(buffers[_slice_index(m)], m.piece) for m in moves]
            for moves in planned.receives
        ]
        self._ranks.exchange(outgoing, incoming)
        brought = {i: values for i, values in buffers.items() if live[i] is None}
        if mix:
            # Products and sum are rounded separately, without a fused multiply-add, so that
            # replicas on other machines get the same bits.
            for index, values in self._params.read_all(brought).items():
                brought[index].mul_(1 - mix).add_(values * mix)
        self._params.write_all(brought)

    def _buffer(self, slice_index: int) -> torch.Tensor:
        if (pinned := self._params.pinned(slice_index)) is not None:
            return pinned
        num_rows, num_cols = _shape(self._params.slices[slice_index])
        return BUFFERS.floats(num_rows * num_cols).view(num_rows, num_cols)

    def _plan_slices(self, holdings: Holdings) -> None:
        """Plan the moves between this rank's slices and the carriers."""
        me = self._ranks.rank
        slice_index = {(s.name, s.rows, s.cols): i for i, s in enumerate(self._params.slices)}
        for index in holdings.of_rank(me):
            rectangle = holdings.rectangle(index)
            holders = holdings.holders(index)
            for piece in self._space.pieces(rectangle):
                move = Move(slice_index[rectangle], piece)
                carrier = self.carriers[piece.part]
                group = self._space.parts[piece.part].part_group
                self._scatters[group].receives[carrier].append(move)
                if _source(holders, carrier) == me:
                    self._gathers[group].sends[carrier].append(move)

    def _plan_parts(self, holdings: Holdings, overlaps: Overlaps) -> None:
        """Plan the moves between the parts that this rank carries and all ranks that hold pieces
        of them.
        """
        me = self._ranks.rank
        mine = np.array(self.carriers, np.int64)[overlaps.part] == me
        for index, number in zip(
            overlaps.rectangle[mine].tolist(), overlaps.part[mine].tolist(), strict=True
        ):
            rectangle = holdings.rectangle(index)
            holders = holdings.holders(index)
            part = self._space.parts[number]
            for piece in self._space.pieces_in(part, rectangle):
                move = Move(None, piece)
                self._gathers[part.part_group].receives[_source(holders, me)].append(move)
                for rank in holders:
                    self._scatters[part.part_group].sends[rank].append(move)


def _source(ranks: Sequence[int], carrier: int) -> int:
    """Return the holder that sends a replicated slice to the carrier: the carrier itself if it
    holds the slice.
    """
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
    return parts[piece.part].as_strided(
        size, (piece.stride, 1), parts[piece.part].storage_offset() + piece.offset
    )
