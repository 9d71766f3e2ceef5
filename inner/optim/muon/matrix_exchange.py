"""Distribute sharded matrices over the ranks of their mesh, one whole matrix each, and return the
results as shards.

dp_replicate   every rank takes its share of the matrices       results are gathered
fsdp, tp       shards go to the rank that gets the matrix       results come back as shards
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from inner.params import local_tensor


class _Axis(NamedTuple):
    """An axis of the mesh with more than one rank."""

    group: ProcessGroup
    size: int
    rank: int
    dim: int | None
    """The dimension of the matrices that the axis shards; None if the axis has replicas."""
    length: int
    """Number of rows or columns of a matrix when the shards of this axis, and of all axes before
    it, are joined."""


@dataclass(frozen=True)
class MatrixExchange:
    """The exchange of matrices of one kind. All ranks of their mesh must make each call
    together.
    """

    axes: list[_Axis]
    """The axes, those with replicas first. If two axes shard the same dimension, the second one was
    applied first."""
    shard: tuple[int, int]
    """Rows and columns of the largest shard. Other shards are padded to this size."""

    @property
    def num_ranks(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def index(self) -> int:
        """Index of the matrix that this rank gets."""
        index = 0
        for axis in self.axes:
            index = index * axis.size + axis.rank
        return index

    def deal(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return this rank's whole matrix out of at most `num_ranks` matrices; zeros if it gets
        none.
        """
        first = local_tensor(matrices[0])
        x = first.new_zeros((self.num_ranks, *self.shard))
        for place, matrix in zip(x, matrices, strict=False):
            local = local_tensor(matrix)
            place[: local.shape[0], : local.shape[1]] = local
        for axis in self.axes:
            x = x.chunk(axis.size)[axis.rank] if axis.dim is None else _join(x, axis, axis.dim)
        # Make it contiguous, because strides affect how matrix products round.
        return x[0].contiguous()

    def collect(self, whole: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Collect the results of all ranks and return them sharded like `matrices`. `whole`: this
        rank's result for its matrix.
        """
        x = whole[None]
        for axis in reversed(self.axes):
            x = _gather(x, axis) if axis.dim is None else _split(x, axis, axis.dim)
        return [_like(piece, matrix) for piece, matrix in zip(x, matrices, strict=False)]

    def gather(self, vector: Tensor, count: int) -> list[Tensor]:
        """Return on every rank the vectors of all ranks that had one of the first `count` matrices.
        `vector`: this rank's vector.
        """
        x = vector[None]
        for axis in reversed(self.axes):
            x = _gather(x, axis)
        return [each.clone() for each in x[:count]]


def build_exchange(matrix: DTensor) -> MatrixExchange:
    """Build the exchange for matrices with the shape and sharding of `matrix`."""
    mesh = matrix.device_mesh
    shape = list(matrix.shape)
    place = mesh.get_coordinate()
    assert place is not None, "this rank is not in the matrix's mesh"
    replicas: list[_Axis] = []
    shards: list[_Axis] = []
    for number in reversed(range(mesh.ndim)):
        placement = matrix.placements[number]
        size = mesh.size(number)
        if size == 1:
            continue
        dim = placement.dim if isinstance(placement, Shard | _StridedShard) else None
        axes = replicas if dim is None else shards
        axes.insert(
            0,
            _Axis(
                mesh.get_group(number), size, place[number], dim, 0 if dim is None else shape[dim]
            ),
        )
        if dim is not None:
            shape[dim] = -(-shape[dim] // size)
    return MatrixExchange(replicas + shards, (shape[0], shape[1]))


def build_row_exchange(stack: DTensor, num_cols: int) -> MatrixExchange:
    """Build the exchange for the matrices of experts whose rows are cut by one axis of their mesh.

    `num_cols`: columns of the matrices that are exchanged, which have the rows of the experts'.
    """
    place = stack.device_mesh.get_coordinate()
    assert place is not None, "this rank is not in the experts' mesh"
    (number,) = (n for n, placement in enumerate(stack.placements) if placement == Shard(1))
    size = stack.device_mesh.size(number)
    axis = _Axis(stack.device_mesh.get_group(number), size, place[number], 0, stack.shape[1])
    return MatrixExchange([axis], (-(-stack.shape[1] // size), num_cols))


def _join(x_MAB: Tensor, axis: _Axis, dim: int) -> Tensor:
    """Exchange shards along an axis, so that each of its ranks gets a share of the matrices with
    all shards joined.
    """
    (M, A, B) = x_MAB.shape
    k = axis.size
    blocks = _swap(x_MAB, axis).view(k, M // k, A, B)
    if dim == 0:
        joined = blocks.transpose(0, 1).reshape(M // k, k * A, B)
    else:
        joined = blocks.permute(1, 2, 0, 3).reshape(M // k, A, k * B)
    return joined.narrow(1 + dim, 0, axis.length)


def _split(x_MAB: Tensor, axis: _Axis, dim: int) -> Tensor:
    """Invert `_join`."""
    k = axis.size
    length = -(-axis.length // axis.size)
    missing = k * length - axis.length
    padded = torch.nn.functional.pad(x_MAB, (0, missing * dim, 0, missing * (1 - dim)))
    M, A, B = padded.shape
    if dim == 0:
        blocks = padded.view(M, k, length, B).transpose(0, 1)
    else:
        blocks = padded.view(M, A, k, length).permute(2, 0, 1, 3)
    return _swap(blocks.flatten(0, 1), axis)


def _swap(x_MAB: Tensor, axis: _Axis) -> Tensor:
    """Send one part of the matrices to each rank of the axis, and receive one part from each."""
    received = torch.empty_like(x_MAB, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x_MAB.contiguous(), group=axis.group)
    return received


def _gather(x: Tensor, axis: _Axis) -> Tensor:
    """Concatenate the tensors of the axis's ranks along the first dimension."""
    gathered = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=axis.group)
    return gathered


def _like(padded: Tensor, matrix: Tensor) -> Tensor:
    rows, cols = local_tensor(matrix).shape
    local = padded[:rows, :cols]
    if not isinstance(matrix, DTensor):
        return local
    return DTensor.from_local(
        local,
        matrix.device_mesh,
        matrix.placements,
        run_check=False,
        shape=matrix.shape,
        stride=matrix.stride(),
    )
