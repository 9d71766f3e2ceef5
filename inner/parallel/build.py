"""A model spread over an island's mesh: each dimension in turn, in the one order in which they compose."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from inner.config import ParallelConfig
from inner.loss import ChunkedCrossEntropy
from inner.mesh import IslandMesh
from inner.model import Transformer
from inner.parallel.compile import compile_blocks
from inner.parallel.context import build_attend, positions
from inner.parallel.forward import LocalStages, StreamShape
from inner.parallel.fsdp import shard
from inner.parallel.pipeline import Pipeline
from inner.parallel.recompute import apply_recompute
from inner.parallel.stages import Stage, plan_stages, ranks_of_stages, stages_at
from inner.parallel.tensor import split_matrices
from inner.presets import ModelSizes


@dataclass(frozen=True)
class Layout:
    """Which model lies how on which mesh, and how it computes."""

    sizes: ModelSizes
    seq_len: int
    mesh: IslandMesh
    parallel: ParallelConfig
    compute_dtype: torch.dtype
    device: torch.device

    @cached_property
    def stages(self) -> list[Stage]:
        """All virtual pipeline stages, in the model's order."""
        return plan_stages(self.parallel, self.sizes.num_layers, self.mesh.degrees.pp)

    @cached_property
    def stage_ranks(self) -> list[int]:
        """The coordinate on `pp` of each stage."""
        return ranks_of_stages(self.parallel.schedule, len(self.stages), self.mesh.degrees.pp)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Where in the sequence this rank's tokens lie, int64 on the CPU."""
        degrees, at = self.mesh.degrees, self.mesh.at
        return positions(self.parallel.context, self.seq_len, degrees.cp, at["cp"])


def build_parts(layout: Layout) -> list[Transformer]:
    """This rank's stages, parameters sharded and without values. Every rank must call it."""
    mine = stages_at(layout.stages, layout.stage_ranks, layout.mesh.at["pp"])
    return [_build_part(layout, stage) for stage in mine]


def _build_part(layout: Layout, stage: Stage) -> Transformer:
    parallel, degrees = layout.parallel, layout.mesh.degrees
    with torch.device("meta"):
        part = Transformer(layout.sizes, layout.positions, stage)
    if part.head is not None:
        part.head.cross_entropy = ChunkedCrossEntropy(parallel.loss_chunk)
    if degrees.cp > 1:
        for layer in part.blocks():
            layer.attention.attend = build_attend(parallel.context, layout.mesh.cp_group)
    if degrees.tp > 1:
        split_matrices(part, layout.mesh.tp, sequence_parallel=parallel.sequence_parallel)
    apply_recompute(part, parallel.recompute)
    if parallel.compile:
        compile_blocks(part, layout.device.type)
    reshard = parallel.frees_after_forward(degrees.pp)
    shard(part, layout.mesh.fsdp, layout.compute_dtype, reshard=reshard)
    return part.to_empty(device=layout.device)


def build_pipeline(
    layout: Layout, parts: Sequence[Transformer], micro_batch: int, num_micro_batches: int
) -> Pipeline | None:
    """The schedule over this rank's stages; None when there is but one stage. Every rank must call it."""
    degrees = layout.mesh.degrees
    if degrees.pp == 1:
        return None
    num_positions = len(layout.positions)
    splits_stream = layout.parallel.splits_stream(degrees.tp)
    stream = StreamShape(
        micro_batch=micro_batch,
        positions=num_positions,
        stream_positions=num_positions // degrees.tp if splits_stream else num_positions,
        dim=layout.sizes.dim,
        dtype=layout.compute_dtype,
    )
    here = LocalStages(parts, layout.stage_ranks, layout.mesh.pp_group, stream, layout.device)
    return Pipeline(here, layout.parallel.schedule, num_micro_batches)


def tied_ends(layout: Layout) -> dist.ProcessGroup | None:
    """The group of the two ranks that hold a tied table's copies; None where no sum over ranks is needed.

    Every rank must call it.
    """
    first, last = layout.stage_ranks[0], layout.stage_ranks[-1]
    if not layout.sizes.tie_embeddings or first == last:
        return None
    columns = layout.mesh.world.mesh.movedim(0, -1).flatten(end_dim=-2).tolist()
    groups: list[Any] = [dist.new_group([column[first], column[last]]) for column in columns]
    mine = layout.mesh.world.get_rank()
    here = [group for group, column in zip(groups, columns, strict=True) if mine in (column[first], column[last])]
    return here[0] if here else None
