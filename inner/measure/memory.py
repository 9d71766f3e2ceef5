"""Estimate the memory that a rank needs in an inner step, in bytes, before anything is launched. No
torch here.
"""

from dataclasses import dataclass, replace

from inner.measure.activations import TOKEN_IDS, ActivationMemory, loss_memory
from inner.measure.gradients import StageGradients, stage_gradients
from inner.measure.workload import FP32, MANAGED_STAGES, FsdpParamGroup, Workload
from inner.model.stage import Stage
from inner.optim.state_bytes import STATE_BYTES, StateBytes
from inner.parallel.pipeline.stages import ONE_STAGE_PER_RANK

MEMORY_PARTS = ("params", "optimizer", "gradients", "gathered", "activations", "loss", "working")


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in bytes: the maximum of each kind, and the peak of all together."""

    params: int
    """This rank's shards of the fp32 master weights."""
    optimizer: int
    """States of the inner optimizer."""
    gradients: int
    """fp32 gradients, sharded or whole, and the gradients of the layer that is being reduced."""
    gathered: int
    """Gathered whole weights in the compute dtype."""
    activations: int
    """Activations that all micro-batches in flight keep for the backward pass."""
    loss: int
    """Logits of a chunk and their gradients; 0 except on the rank of the last stage."""
    working: int
    """Recomputed activations and temporary gradients in the backward of one layer."""
    peak: int
    """Maximum over the step. It is less than the sum of the other fields, because their maxima
    occur at different times."""


def estimate_memory(
    work: Workload, optimizer: str | StateBytes, device_type: str = "cuda"
) -> list[MemoryEstimate]:
    """Return the memory of the fullest rank of each coordinate on pp. `optimizer`: its
    name in the config, or the bytes that it keeps per element.
    """
    activations = ActivationMemory(work, device_type)
    kept = STATE_BYTES[optimizer] if isinstance(optimizer, str) else optimizer
    return [
        _estimate_rank(_Rank(work, activations, pp_rank), kept)
        for pp_rank in range(work.degrees.pp)
    ]


def _estimate_rank(rank: "_Rank", optimizer: StateBytes) -> MemoryEstimate:
    work = rank.work
    params = sum(FP32 * group.shard_numel for group in rank.groups)
    optimizer_state = optimizer_bytes(work, rank.stages, optimizer)
    snapshots = rank.snapshots()
    # When the optimizer steps, only gradients are left, and without FSDP the copies in the compute
    # dtype. Fused AdamW and SGD need no memory of their own.
    in_update = params + (0 if work.uses_fsdp else rank.gathered)
    in_passes = max(snapshot.total - snapshot.not_gathered for snapshot in snapshots)
    beside = max(in_update, rank.gathered + rank.buffers + in_passes)
    return MemoryEstimate(
        params=params,
        optimizer=optimizer_state,
        gradients=max(params, *(snapshot.gradients for snapshot in snapshots)),
        gathered=rank.gathered,
        activations=max(snapshot.activations for snapshot in snapshots) + rank.buffers,
        loss=max(snapshot.loss for snapshot in snapshots),
        working=max(snapshot.working for snapshot in snapshots),
        peak=params + optimizer_state + beside,
    )


def optimizer_bytes(work: Workload, stages: list[Stage], optimizer: StateBytes) -> int:
    """Return the bytes of the optimizer's states for a rank's stages."""
    groups = [group for stage in stages for group in work.param_groups(stage)]
    num_elements = sum(group.shard_numel for group in groups)
    in_matrices = 0
    for has_experts, count in work.layer_kinds(stages):
        for group in work.layer_groups(has_experts):
            matrices = FsdpParamGroup(
                tuple(s for s in group.all_shapes if s[1] > 1), num_shards=group.num_shards
            )
            in_matrices += count * matrices.shard_numel
    return optimizer.block_matrix * in_matrices + optimizer.other * (num_elements - in_matrices)


@dataclass(frozen=True)
class _Snapshot:
    """Memory in bytes at one point of a step, without weights and optimizer."""

    activations: int
    gradients: int
    loss: int = 0
    working: int = 0
    not_gathered: int = 0
    """Of the weights that a rank has gathered at most, what it has not gathered at this point."""

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.loss + self.working


@dataclass(frozen=True)
class _Rank:
    """One coordinate on pp with its workload."""

    work: Workload
    activations: ActivationMemory
    pp_rank: int

    @property
    def stages(self) -> list[Stage]:
        return self.work.stages_at(self.pp_rank)

    @property
    def groups(self) -> list[FsdpParamGroup]:
        return [group for stage in self.stages for group in self.work.param_groups(stage)]

    @property
    def gathered(self) -> int:
        """Bytes of gathered weights. With ZeRO-3: the root, the current block and the prefetched
        next block; otherwise all stages.

        Without FSDP nothing is gathered. A rank then has copies in the compute dtype, or no copies
        if the masters have that dtype.
        """
        work = self.work
        if not work.uses_fsdp:
            copied = [group for group in self.groups if not group.is_exact]
            return work.compute_bytes(copied) if work.compute_itemsize < FP32 else 0
        if work.degrees.pp == 1:
            root = work.compute_bytes([work.root(self.stages[0])])
            is_sharded = work.num_shards > 1
            # The last gather of the forward is that of the head, if it is untied. Its buffer
            # remains until the backward gathers again, which never happens with ZeRO-2.
            buffer = root if is_sharded and not work.sizes.tie_embeddings else 0
            if not work.frees_after_forward:
                return work.compute_bytes(self.groups) + buffer
            blocks = self._gathered_blocks(2 if is_sharded else 1)
            return max(
                root + max(blocks, buffer), work.compute_bytes([work.embedding(self.stages[0])])
            )
        by_stage = sorted(
            (work.compute_bytes(work.param_groups(stage)) for stage in self.stages), reverse=True
        )
        most = len(by_stage) if work.parallel.schedule in ONE_STAGE_PER_RANK else MANAGED_STAGES
        return sum(by_stage[:most])

    def _not_gathered(self, layer: int | None) -> int:
        """Return what a rank has not gathered, of the weights that it gathers at most, in the
        backward of a layer; None: at the loss.

        It is 0 for dense models, whose blocks are about as large as the head or smaller.
        """
        work = self.work
        if work.sizes.experts is None or not work.uses_fsdp or work.degrees.pp > 1:
            return 0
        if not work.frees_after_forward:
            return 0
        root = work.compute_bytes([work.root(self.stages[0])])
        is_sharded = work.num_shards > 1
        if layer is None:
            return self.gathered - root - root * (is_sharded and not work.sizes.tie_embeddings)
        # An untied head is freed when its gradients have been computed.
        rest = root if work.sizes.tie_embeddings else 0
        return self.gathered - rest - self._in_a_row(layer, 2 if is_sharded else 1)

    def _gathered_blocks(self, most: int) -> int:
        """Return the bytes of the largest `most` layers in a row of a model in one stage."""
        return max(self._in_a_row(layer, most) for layer in range(self.work.sizes.num_layers))

    def _in_a_row(self, last: int, most: int) -> int:
        """Return the bytes of the weights of at most this many layers, the last of which is
        given.
        """
        return sum(
            self.work.compute_bytes(self.work.layer_groups(self.work.sizes.has_experts(layer)))
            for layer in range(max(0, last - most + 1), last + 1)
        )

    @property
    def buffers(self) -> int:
        """Bytes of pipeline buffers for each micro-batch: input of a stage, its gradient, and the
        gradient of its output.
        """
        num_streams = sum(2 * (not stage.is_first) + (not stage.is_last) for stage in self.stages)
        return (
            self.activations.stream * self.work.num_micro_batches * num_streams
            if self.work.degrees.pp > 1
            else 0
        )

    def _kept(self, stage: Stage) -> int:
        """Return the bytes of one micro-batch's activations in one stage, without the pipeline
        buffers.
        """
        total = self._of_layers(stage.layers)
        total += TOKEN_IDS * self.work.tokens * (stage.is_first or stage.is_last)
        if stage.is_last:
            total += (
                self.activations.stream_norm + self.work.sizes.num_depths * self.activations.joint
            )
        elif self.work.stage_ranks[stage.index + 1] != self.pp_rank:
            # An output that was sent is kept until its gradient returns.
            total += self.activations.stream
        return total - self.activations.stream * (
            not stage.is_first and self.activations.keeps_input
        )

    def snapshots(self) -> list[_Snapshot]:
        """Return the memory at all points of a step at which it may be at its peak."""
        stages = {stage.index: stage for stage in self.stages}
        num_backwards = dict.fromkeys(stages, 0)
        loss = loss_memory(self.work)
        kept = losses = 0
        snapshots: list[_Snapshot] = []
        for action in self.work.orders[self.pp_rank]:
            stage = stages[action.stage]
            held = {
                index: stage_gradients(self.work, stages[index], number)
                for index, number in num_backwards.items()
            }
            gradients = sum(each.before for each in held.values())
            if action.kind == "forward":
                kept += self._kept(stage)
                in_loss = losses * loss.kept + loss.forward * stage.is_last
                snapshots.append(
                    _Snapshot(kept, gradients, in_loss, not_gathered=self._not_gathered(None))
                )
                losses += stage.is_last
                continue
            now = _Snapshot(kept, gradients, losses * loss.kept)
            new = held[action.stage]
            if action.kind != "weight_backward":
                snapshots += self._backward(
                    stage, now, None if action.kind == "input_backward" else new
                )
            if action.kind != "backward":
                kinds = self.work.layer_kinds([stage])
                split = sum(
                    count * self.activations.split_backward(has_experts)
                    for has_experts, count in kinds
                )
                split += loss.kept * stage.is_last
                kept += split if action.kind == "input_backward" else -split
            if action.kind != "input_backward":
                kept -= self._kept(stage)
                losses -= stage.is_last
                num_backwards[action.stage] += 1
            at_end = {"backward": new.at_end, "weight_backward": new.all_at_once}.get(
                action.kind, new.before
            )
            snapshots.append(_Snapshot(kept, gradients - new.before + at_end, losses * loss.kept))
        return snapshots

    def _backward(
        self, stage: Stage, now: _Snapshot, new: StageGradients | None
    ) -> list[_Snapshot]:
        """Return snapshots of a backward: at the loss, then at each layer from the last to the
        first.

        `new` is None in the half of a split backward that computes only the gradients of inputs.
        """
        recompute = self.work.parallel.recompute
        loss = loss_memory(self.work).kept * stage.is_last
        now = replace(now, not_gathered=self._not_gathered(None))
        snapshots = [replace(now, loss=now.loss + loss)]
        others = now.gradients - (new.before if new else 0)
        if new:
            snapshots.append(replace(now, gradients=others + new.at_root, loss=now.loss - loss))
        for done in range(len(stage.layers)):
            border = len(stage.layers) - done
            kept = now.activations - self._of_layers(stage.layers[border:])
            layer = stage.layers[border - 1]
            working = self.activations.backward(recompute, self.work.sizes.has_experts(layer))
            gradients = others + (new.after(done) if new else 0)
            not_gathered = self._not_gathered(layer)
            snapshots.append(_Snapshot(kept, gradients, now.loss - loss, working, not_gathered))
        return snapshots

    def _of_layers(self, layers: range) -> int:
        """Return the bytes of one micro-batch's activations in some layers."""
        recompute = self.work.parallel.recompute
        return sum(
            count * self.activations.block(recompute, has_experts)
            for has_experts, count in self.work.sizes.layer_kinds(layers)
        )
