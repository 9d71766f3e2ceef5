"""Estimates the memory that a rank needs in an inner step, in bytes, before anything is launched. No torch here."""

from dataclasses import dataclass, replace

from inner.measure.activations import FP32, TOKEN_IDS, ActivationMemory, loss_memory
from inner.measure.fsdp_gathers import MANAGED_STAGES
from inner.measure.workload import FsdpParamGroup, Workload
from inner.model.stage import Stage
from inner.parallel.pipeline.stages import ONE_STAGE_PER_RANK

MEMORY_PARTS = ("params", "optimizer", "gradients", "gathered", "activations", "loss", "working")


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in bytes: the maximum of each kind, and the peak of all together."""

    params: int
    """This rank's shards of the fp32 master weights."""
    optimizer: int
    """State of the inner optimizer."""
    gradients: int
    """fp32; with several micro-batches each rank accumulates whole gradients, which the last micro-batch shards."""
    gathered: int
    """Whole weights in the compute dtype."""
    activations: int
    """Activations that all micro-batches in flight keep for the backward pass."""
    loss: int
    """Logits of a chunk and their gradients; 0 except on the rank of the last stage."""
    working: int
    """Recomputed activations and temporary gradients in the backward of one layer."""
    peak: int
    """Maximum over the step; less than the sum of the maxima, as these occur at different times."""
    outer: int
    """Global params and outer momentum, which are on the CPU and not part of the peak."""


def estimate_memory(work: Workload, optimizer: str, device_type: str = "cuda") -> list[MemoryEstimate]:
    """Memory of the fullest rank of each coordinate on pp. `optimizer` is a name of OptimizerConfig."""
    activations = ActivationMemory(work, device_type)
    return [_estimate_rank(_Rank(work, activations, pp_rank), optimizer) for pp_rank in range(work.degrees.pp)]


def _estimate_rank(rank: "_Rank", optimizer: str) -> MemoryEstimate:
    work = rank.work
    params = sum(FP32 * group.shard_numel(work.degrees.fsdp) for group in rank.groups)
    optimizer_state = optimizer_bytes(work, rank.stages, optimizer)
    snapshots = rank.snapshots()
    # When the optimizer steps, only gradients are left; fused AdamW and SGD need no memory of their own.
    beside = max(params, rank.gathered + rank.buffers + max(snapshot.total for snapshot in snapshots))
    return MemoryEstimate(
        params=params,
        optimizer=optimizer_state,
        gradients=max(params, *(snapshot.gradients for snapshot in snapshots)),
        gathered=rank.gathered,
        activations=max(snapshot.activations for snapshot in snapshots) + rank.buffers,
        loss=max(snapshot.loss for snapshot in snapshots),
        working=max(snapshot.working for snapshot in snapshots),
        peak=params + optimizer_state + beside,
        outer=2 * params,
    )


def optimizer_bytes(work: Workload, stages: list[Stage], optimizer: str) -> int:
    """Two moments of every weight for AdamW; with Muon, matrices of the layers have only one."""
    if optimizer == "sgd":
        return 0
    groups = [group for stage in stages for group in _param_groups(work, stage)]
    total = sum(2 * FP32 * group.shard_numel(work.degrees.fsdp) for group in groups)
    if optimizer == "muon":
        num_layers = sum(len(stage.layers) for stage in stages)
        matrices = FsdpParamGroup(tuple(shape for shape in work.block.shapes if shape[1] > 1))
        total -= FP32 * num_layers * matrices.shard_numel(work.degrees.fsdp)
    return total


def _param_groups(work: Workload, stage: Stage) -> list[FsdpParamGroup]:
    return [work.root(stage)] + [work.block] * len(stage.layers)


def _numel(work: Workload, stage: Stage) -> int:
    return sum(group.numel for group in _param_groups(work, stage))


@dataclass(frozen=True)
class _Snapshot:
    """Memory in bytes at one point of a step, without weights and optimizer."""

    activations: int
    gradients: int
    loss: int = 0
    working: int = 0

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
        return [group for stage in self.stages for group in _param_groups(self.work, stage)]

    @property
    def gathered(self) -> int:
        """With ZeRO-3 the root, the current block and the prefetched next one; otherwise the rank's whole stages."""
        work, itemsize = self.work, self.work.compute_itemsize
        if work.degrees.pp == 1 and work.frees_after_forward:
            num_blocks = min(2 if work.degrees.fsdp > 1 else 1, work.sizes.num_layers)
            return itemsize * (work.root(self.stages[0]).numel + num_blocks * work.block.numel)
        by_stage = sorted((_numel(work, stage) for stage in self.stages), reverse=True)
        most = len(by_stage) if work.degrees.pp == 1 or work.parallel.schedule in ONE_STAGE_PER_RANK else MANAGED_STAGES
        return itemsize * sum(by_stage[:most])

    @property
    def buffers(self) -> int:
        """Pipeline buffers: input of a stage, its gradient, and the gradient of its output, for each micro-batch."""
        num_streams = sum(2 * (not stage.is_first) + (not stage.is_last) for stage in self.stages)
        return self.activations.stream * self.work.num_micro_batches * num_streams if self.work.degrees.pp > 1 else 0

    def _kept(self, stage: Stage) -> int:
        """Activations of one micro-batch in one stage, without the buffers."""
        total = len(stage.layers) * self.activations.block(self.work.parallel.recompute)
        total += TOKEN_IDS * self.work.tokens * (stage.is_first or stage.is_last)
        if stage.is_last:
            total += self.activations.stream_norm
        elif self.work.stage_ranks[stage.index + 1] != self.pp_rank:
            # A sent output is kept until its gradient returns.
            total += self.activations.stream
        return total - self.activations.stream * (not stage.is_first and self.activations.keeps_input)

    def snapshots(self) -> list[_Snapshot]:
        """The points of a step that include the peak."""
        stages = {stage.index: stage for stage in self.stages}
        num_backwards = dict.fromkeys(stages, 0)
        loss = loss_memory(self.work)
        kept = losses = 0
        snapshots: list[_Snapshot] = []
        for action in self.work.orders[self.pp_rank]:
            stage = stages[action.stage]
            started = [stages[index] for index, number in num_backwards.items() if number]
            gradients = sum(FP32 * _numel(self.work, other) for other in started)
            if action.kind == "forward":
                kept += self._kept(stage)
                snapshots.append(_Snapshot(kept, gradients, losses * loss.kept + loss.forward * stage.is_last))
                losses += stage.is_last
                continue
            if action.kind != "weight_backward":
                now = _Snapshot(kept, gradients, losses * loss.kept)
                snapshots += self._backward(stage, now, num_backwards[action.stage])
            if action.kind != "backward":
                split = self.activations.split_backward * len(stage.layers) + loss.kept * stage.is_last
                kept += split if action.kind == "input_backward" else -split
                snapshots.append(_Snapshot(kept, gradients, losses * loss.kept))
            if action.kind != "input_backward":
                kept -= self._kept(stage)
                losses -= stage.is_last
                num_backwards[action.stage] += 1
        return snapshots

    def _backward(self, stage: Stage, now: _Snapshot, number: int) -> list[_Snapshot]:
        """Snapshots in the backward of micro-batch `number`: the loss, then each layer from the last to the first.

        The first micro-batch allocates the gradients, and in the last one each layer shards its own.
        """
        work, recompute = self.work, self.work.parallel.recompute
        block, shard = FP32 * work.block.numel, FP32 * work.block.shard_numel(work.degrees.fsdp)
        # A pipeline shards the gradients of a stage only after all micro-batches.
        is_first, is_last = number == 0, number == work.num_micro_batches - 1 and work.degrees.pp == 1
        loss = loss_memory(work).kept * stage.is_last
        snapshots = [replace(now, loss=now.loss + loss)]
        # The root's gradients stay until the end.
        gradients = now.gradients + work.compute_itemsize * work.root(stage).numel * is_first
        for done in range(len(stage.layers) if is_first or is_last else 1):
            allocated = done * block * is_first
            # The previous layer is still being sent from a buffer of its own.
            reduced = (done * (shard - block) + min(done, 1) * block) * is_last
            kept = now.activations - done * self.activations.block(recompute)
            working = self.activations.backward(recompute)
            snapshots.append(_Snapshot(kept, gradients + allocated + reduced, now.loss - loss, working))
        if is_last:
            root, root_shard = work.root(stage).numel, work.root(stage).shard_numel(work.degrees.fsdp)
            own = root * (work.compute_itemsize if is_first else FP32)
            snapshots.append(_Snapshot(0, len(stage.layers) * shard + own + FP32 * (root + root_shard)))
        return snapshots
