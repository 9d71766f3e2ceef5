"""Predict Muon's traffic in a step: it sends shards of matrices, orthogonalises whole matrices, and
sends shards back. No torch here.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from inner.measure.workload import Workload
from inner.model.block_params import BlockParam, block_params
from inner.model.stage import Stage

FP32 = 4


class MatrixKind(NamedTuple):
    """The matrices that have one shape and one sharding. FSDP shards their rows."""

    rows: int
    cols: int
    tp_dim: int | None
    """The dimension that tp shards; None if every rank of tp has the whole matrix."""


class AxisCalls(NamedTuple):
    """Calls of one operation along an axis, each with `size` bytes of input."""

    axis: str
    op: str
    calls: int
    size: int


def list_exchanges(work: Workload, stages: list[Stage]) -> Iterator[AxisCalls]:
    """Yield Muon's exchanges for the matrices of these stages' layers, if one param group has them
    all. The matrices of experts are not sent if they are whole on their ranks.
    """
    kinds: Counter[MatrixKind] = Counter()
    for has_experts, num_layers in work.layer_kinds(stages):
        if has_experts and work.cuts_rows_of_experts:
            yield from _exchanges_of_experts(work, num_layers)
    for has_experts, num_layers in work.layer_kinds(stages):
        for param in block_params(work.sizes, has_experts=has_experts):
            if param.is_matrix and not param.is_stacked:
                kinds[_kind_of(work, param)] += num_layers
    for param in block_params(work.sizes, has_experts=False, predicts=True):
        if param.is_matrix and param.place == "extra depths":
            kinds[_kind_of(work, param)] += work.sizes.num_depths * stages[-1].is_last
    for kind, count in kinds.items():
        yield from _exchanges_of(work, kind, -(-count // _num_ranks(work)))


def _exchanges_of_experts(work: Workload, num_layers: int) -> Iterator[AxisCalls]:
    """Yield the exchanges of experts of which each rank of edp has some rows."""
    for param in block_params(work.sizes, has_experts=True):
        if param.is_stacked:
            rows, cols = param.shape(work.sizes)
            yield AxisCalls("edp", "all_to_all", 2 * num_layers, rows * cols * FP32)


def _kind_of(work: Workload, matrix: BlockParam) -> MatrixKind:
    rows, cols = matrix.shape(work.sizes)
    tp = work.degrees.tp
    if tp == 1:
        return MatrixKind(rows, cols, 0)
    if matrix.is_on_all_ranks(work.sizes, tp):
        return MatrixKind(rows, cols, None)
    return MatrixKind(rows, cols, 0 if matrix.is_input else 1)


def _num_ranks(work: Workload) -> int:
    """Return the number of ranks over which a stage's parameters are spread."""
    return work.degrees.dp_replicate * work.degrees.fsdp * work.degrees.tp


def _exchanges_of(work: Workload, kind: MatrixKind, batches: int) -> Iterator[AxisCalls]:
    """Yield the exchanges of `batches` batches, each of one matrix per rank
    (inner/optim/muon/matrix_exchange.py).
    """
    shards = work.num_shards
    replicas = work.degrees.num_copies // shards
    tp = work.degrees.tp
    rows = kind.rows // tp if kind.tp_dim == 0 else kind.rows
    cols = kind.cols // tp if kind.tp_dim == 1 else kind.cols
    tp_replicas = tp if kind.tp_dim is None else 1
    shard = -(-rows // shards) * cols * FP32
    share = _num_ranks(work) // (replicas * tp_replicas)
    if shards > 1:
        yield AxisCalls("fsdp", "all_to_all", 2 * batches, share * shard)
    if kind.tp_dim is not None:
        yield AxisCalls("tp", "all_to_all", 2 * batches, share // shards * rows * cols * FP32)
    else:
        yield AxisCalls("tp", "all_gather", batches, share * shard)
    pieces = share * tp_replicas * shard
    if shards < work.degrees.fsdp:
        # Whole weights on the ranks of cp, whose axis comes after dp_replicate.
        yield AxisCalls("fsdp", "all_gather", batches, pieces)
        pieces *= work.degrees.fsdp
    yield AxisCalls("dp_replicate", "all_gather", batches, pieces)
