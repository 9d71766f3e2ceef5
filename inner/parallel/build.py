"""Build a rank's share of a model. Parallel dimensions are applied in the only order in which they
can be combined.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from inner.config import ParallelConfig
from inner.data.micro_batch import Cutter
from inner.flops import layer_costs
from inner.mesh import IslandMesh
from inner.model.dropout import DropoutSource
from inner.model.loss import ChunkedCrossEntropy
from inner.model.sizes import ModelSizes, OwnModel
from inner.model.stage import Stage
from inner.model.transformer import Transformer
from inner.parallel.compile import compile_blocks, is_compiled
from inner.parallel.context.build import build_attend, rank_positions
from inner.parallel.expert import apply_expert_parallel
from inner.parallel.one_stage import OneStage, whole_loss
from inner.parallel.own_model import build_own_model, own_model_loss
from inner.parallel.pipeline.evaluation import LocalStages, StreamShape
from inner.parallel.pipeline.stages import plan_stages, ranks_of_stages, stages_at
from inner.parallel.recompute import apply_recompute
from inner.parallel.tensor import apply_tensor_parallel
from inner.parallel.weights.compute_copies import ComputeCopies
from inner.parallel.weights.fsdp import apply_block_fsdp, apply_fsdp
from inner.parallel.weights.replicas import ReplicaSums, replicate
from inner.parallel.weights.zero_stage import has_sparse_experts, has_whole_weights, uses_fsdp

if TYPE_CHECKING:
    from inner.parallel.pipeline.step import Pipeline


@dataclass(frozen=True)
class Layout:
    """A model, the mesh that it is spread over, and how it computes there."""

    model: ModelSizes | OwnModel
    seq_len: int
    """Length of the longest sequences of the run, by which layers are dealt to pipeline stages."""
    mesh: IslandMesh
    parallel: ParallelConfig
    compute_dtype: torch.dtype
    device: torch.device
    z_loss: float = 0.0
    """As in OptimizerConfig."""

    @property
    def sizes(self) -> ModelSizes:
        """Sizes of the built-in decoder."""
        assert isinstance(self.model, ModelSizes), (
            f"{self.model} is an own model, which has no sizes and only one stage"
        )
        return self.model

    @cached_property
    def stages(self) -> list[Stage]:
        """All virtual pipeline stages, in the order of the model."""
        costs = layer_costs(self.sizes, self.seq_len, self.parallel.recompute)
        return plan_stages(self.parallel, costs, self.mesh.degrees.pp)

    @cached_property
    def is_compiled(self) -> bool:
        """Whether the computation of each micro-batch is compiled. An own model is compiled only if
        the config asks for it.
        """
        if isinstance(self.model, OwnModel):
            return self.parallel.compile is True
        if self.model.experts is not None:
            # The number of rows per expert differs in each step, and the compiler would fix it.
            return False
        return is_compiled(self.parallel, self.mesh.degrees, self.device.type)

    @property
    def has_sparse_mesh(self) -> bool:
        """Whether the model has experts, and they are spread in another way than other weights."""
        return has_sparse_experts(self.mesh.degrees, self.model)

    @cached_property
    def has_whole_weights(self) -> bool:
        """Whether several ranks compute with the same weights, and each holds them whole."""
        return has_whole_weights(self.parallel, self.mesh.degrees, self.model)

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP gathers the weights, or the experts alone."""
        return uses_fsdp(self.parallel, self.mesh.degrees, self.model)

    @cached_property
    def stage_ranks(self) -> list[int]:
        """The coordinate on `pp` of each stage."""
        return ranks_of_stages(self.parallel.schedule, len(self.stages), self.mesh.degrees.pp)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Positions in the longest sequence that this rank holds, int64 on the CPU."""
        return self.positions_at(self.seq_len)

    def positions_at(self, seq_len: int) -> torch.Tensor:
        """Return the positions that this rank holds in sequences of this length, int64 on the
        CPU.
        """
        return rank_positions(
            self.parallel.context, seq_len, self.mesh.degrees.cp, self.mesh.at["cp"]
        )


def build_stages(layout: Layout) -> list[Transformer]:
    """Build this rank's stages, with parameters that are sharded and without values. Every rank
    must call it.
    """
    if isinstance(layout.model, OwnModel):
        return [_build_own_model(layout, layout.model)]
    mine = stages_at(layout.stages, layout.stage_ranks, layout.mesh.at["pp"])
    return [build_stage(layout, stage) for stage in mine]


def build_whole(layout: Layout) -> nn.Module:
    """Build the whole model without memory, for the names and shapes of its parameters."""
    if isinstance(layout.model, OwnModel):
        return build_own_model(layout.model, layout.seq_len)
    with torch.device("meta"):
        return Transformer(layout.model, layout.positions)


def _build_own_model(layout: Layout, own: OwnModel) -> Transformer:
    parallel = layout.parallel
    model = build_own_model(own, layout.seq_len)
    apply_recompute(model, parallel.recompute)
    if layout.is_compiled:
        compile_blocks(model, layout.device.type)
    if layout.has_whole_weights:
        replicate(model, layout.mesh.copies)
    if layout.uses_fsdp:
        apply_block_fsdp(
            model,
            layout.mesh.fsdp,
            layout.compute_dtype,
            reshard=parallel.frees_after_forward(pp=1),
        )
    return model.to_empty(device=layout.device)


def build_stage(layout: Layout, stage: Stage) -> Transformer:
    """Build a stage for the ranks of its pp coordinate, with parameters that are sharded and
    without values. All of these ranks must call it.
    """
    parallel = layout.parallel
    degrees = layout.mesh.degrees
    with torch.device("meta"):
        model = Transformer(layout.sizes, layout.positions, stage, layout.seq_len)
    if model.head is not None:
        # With a split vocabulary, the loss contains sums over ranks, which cannot be compiled.
        fuses_loss = layout.is_compiled and degrees.tp == 1
        model.head.cross_entropy = ChunkedCrossEntropy(
            parallel.loss_chunk, z_loss=layout.z_loss, cap=model.head.cap, compiled=fuses_loss
        )
    if degrees.cp > 1:
        for layer in model.blocks():
            layer.attention.attend = build_attend(parallel.context, layout.mesh.cp_group)
    if degrees.tp > 1:
        apply_tensor_parallel(
            model, layout.mesh.tp, sequence_parallel=parallel.splits_stream(degrees.tp)
        )
    if degrees.ep > 1:
        apply_expert_parallel(model, layout.mesh.sparse["ep"])
    apply_recompute(model, parallel.recompute)
    if layout.is_compiled:
        compile_blocks(model, layout.device.type)
    if layout.has_whole_weights:
        replicate(model, layout.mesh.copies)
    if layout.uses_fsdp:
        reshard = parallel.frees_after_forward(degrees.pp)
        expert_mesh = layout.mesh.edp if layout.has_sparse_mesh else None
        apply_fsdp(
            model, layout.mesh.fsdp, layout.compute_dtype, reshard=reshard, expert_mesh=expert_mesh
        )
    return model.to_empty(device=layout.device)


def build_cutter(layout: Layout, seq_len: int, eos_id: int | None) -> Cutter:
    """Build the cutter of windows of `seq_len` + 1 tokens into this rank's micro-batches; `eos_id`
    as in TrainerSettings.
    """
    everywhere = layout.parallel.context == "ulysses"
    num_depths = layout.model.num_depths if isinstance(layout.model, ModelSizes) else 0
    return Cutter(
        layout.positions_at(seq_len), seq_len, eos_id, layout.device, everywhere, num_depths
    )


def build_dropout(layout: Layout, rate: float, seed: int, seq_len: int) -> DropoutSource | None:
    """Build the source of this rank's masks for sequences of this length; None without dropout."""
    if rate == 0:
        return None
    positions_S = layout.positions_at(seq_len)
    tp = layout.mesh.degrees.tp
    if layout.parallel.splits_stream(tp):
        positions_S = positions_S.chunk(tp)[layout.mesh.at["tp"]]
    return DropoutSource(rate, seed, positions_S.to(layout.device))


def build_copies(layout: Layout, stages: Sequence[Transformer]) -> ComputeCopies:
    """Build what a trainer computes with in place of its fp32 weights, and where replicas sum their
    gradients. Every rank must call it.
    """
    sums = ReplicaSums(stages, layout.mesh.copies_group) if layout.has_whole_weights else None
    return ComputeCopies(stages, layout.compute_dtype, sums)


@dataclass(frozen=True)
class StepShape:
    """What a step of one rank consists of. It may differ between the stages of a run."""

    micro_batch: int
    """Number of sequences in a micro-batch."""
    seq_len: int
    num_micro_batches: int


def build_runner(
    layout: Layout, stages: Sequence[Transformer], copies: ComputeCopies, shape: StepShape
) -> "OneStage | Pipeline":
    """Build the runner of this rank's stages over the micro-batches of a step of this shape. Every
    rank must call it. `copies`: those of the stages, which all runners of a trainer share.
    """
    degrees = layout.mesh.degrees
    reduces_each = layout.parallel.reduces_each_micro_batch(
        1 if layout.has_whole_weights else degrees.fsdp
    )
    if degrees.pp == 1:
        loss = own_model_loss if isinstance(layout.model, OwnModel) else whole_loss
        keeps_weights = layout.parallel.keeps_weights
        return OneStage(
            stages[0],
            layout.device,
            copies,
            loss=loss,
            reduces_each=reduces_each,
            keeps_weights=keeps_weights,
        )
    num_positions = len(layout.positions_at(shape.seq_len))
    stream_positions = (
        num_positions // degrees.tp if layout.parallel.splits_stream(degrees.tp) else num_positions
    )
    stream = StreamShape(
        shape.micro_batch, num_positions, stream_positions, layout.sizes.dim, layout.compute_dtype
    )
    local = LocalStages(stages, layout.stage_ranks, layout.mesh.pp_group, stream, layout.device)
    # Imported here because torch's schedules bring its compiler, which most islands do not need.
    from inner.parallel.pipeline.step import Pipeline

    return Pipeline(
        local, copies, layout.parallel.schedule, shape.num_micro_batches, reduces_each=reduces_each
    )


def build_tied_group(layout: Layout) -> dist.ProcessGroup | None:
    """Return the group of the two ranks with copies of the embedding's table; None if no sum is
    needed. Every rank must call it.
    """
    if isinstance(layout.model, OwnModel):
        return None
    first = layout.stage_ranks[0]
    last = layout.stage_ranks[-1]
    if not layout.sizes.last_stage_embeds or first == last:
        return None
    # pp is the outermost axis: a stage's ranks are adjacent, and copies are at the same place in
    # their stages.
    per_stage = layout.mesh.degrees.num_ranks // layout.mesh.degrees.pp
    pairs = [(first * per_stage + place, last * per_stage + place) for place in range(per_stage)]
    groups: list[Any] = [dist.new_group(list(pair)) for pair in pairs]
    mine = layout.mesh.world.get_rank()
    own = [group for group, pair in zip(groups, pairs, strict=True) if mine in pair]
    return own[0] if own else None
