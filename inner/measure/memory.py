"""What a rank's memory must hold in an inner step, before anything is launched. In bytes; needs no torch."""

from dataclasses import dataclass, replace

from inner.measure.activations import FP32, Activations, loss_memory
from inner.measure.gathers import MANAGED_STAGES
from inner.measure.units import Unit, Workload
from inner.parallel.stages import SINGLE, Stage

PARTS = ("params", "optimizer", "gradients", "gathered", "activations", "loss", "working")


@dataclass(frozen=True)
class Memory:
    """Of one rank: what each thing takes at most, and all of them at the worst moment."""

    params: int
    """fp32 master weights: this rank's shards."""
    optimizer: int
    """Moments of the inner optimizer."""
    gradients: int
    """fp32. Of several micro-batches whole ones add up on every rank, and are sharded in the last."""
    gathered: int
    """Whole weights in the compute dtype."""
    activations: int
    """Kept for the backward pass by all micro-batches in flight."""
    loss: int
    """Logits of a chunk and the gradients made from them; 0 but on the last stage's rank."""
    working: int
    """Of the backward pass of one layer: what it computes again, and gradients under way."""
    peak: int
    """At the worst moment; less than the sum, as not all are at their most together."""
    outer: int
    """Global params and outer momentum, on the CPU; not in the peak."""


def estimate(work: Workload, optimizer: str, device_type: str = "cuda") -> list[Memory]:
    """Memory by coordinate on pp, each of its fullest rank. `optimizer`: a name of OptimizerConfig."""
    activations = Activations(work, device_type)
    return [_estimate(_Rank(work, activations, pp_rank), optimizer) for pp_rank in range(work.degrees.pp)]


def _estimate(rank: "_Rank", optimizer: str) -> Memory:
    work = rank.work
    params = sum(FP32 * unit.shard_numel(work.degrees.fsdp) for unit in rank.units)
    optimizer_state = optimizer_bytes(work, rank.stages, optimizer)
    moments = rank.moments()
    # When the optimizer steps only gradients are left; fused AdamW and SGD need no room of their own.
    beside = max(params, rank.gathered + rank.buffers + max(moment.total for moment in moments))
    return Memory(
        params=params,
        optimizer=optimizer_state,
        gradients=max(params, *(moment.gradients for moment in moments)),
        gathered=rank.gathered,
        activations=max(moment.activations for moment in moments) + rank.buffers,
        loss=max(moment.loss for moment in moments),
        working=max(moment.working for moment in moments),
        peak=params + optimizer_state + beside,
        outer=2 * params,
    )


def optimizer_bytes(work: Workload, stages: list[Stage], optimizer: str) -> int:
    """Two moments of every weight for AdamW; for Muon one of the layers' matrices, which it steps."""
    if optimizer == "sgd":
        return 0
    units = [unit for stage in stages for unit in _units(work, stage)]
    total = sum(2 * FP32 * unit.shard_numel(work.degrees.fsdp) for unit in units)
    if optimizer == "muon":
        num_layers = sum(len(stage.layers) for stage in stages)
        matrices = Unit(tuple(shape for shape in work.block.shapes if shape[1] > 1))
        total -= FP32 * num_layers * matrices.shard_numel(work.degrees.fsdp)
    return total


def _units(work: Workload, stage: Stage) -> list[Unit]:
    return [work.root(stage)] + [work.block] * len(stage.layers)


@dataclass(frozen=True)
class _Moment:
    """Bytes at one time of a step, beside weights and optimizer."""

    activations: int
    gradients: int
    loss: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.loss + self.working


@dataclass(frozen=True)
class _Rank:
    """A coordinate on pp, and what passes through it."""

    work: Workload
    kept: Activations
    pp_rank: int

    @property
    def stages(self) -> list[Stage]:
        return self.work.stages_at(self.pp_rank)

    @property
    def units(self) -> list[Unit]:
        return [unit for stage in self.stages for unit in _units(self.work, stage)]

    @property
    def gathered(self) -> int:
        """ZeRO-3: the root, the block that computes, and the next one, under way; else a rank's whole stages."""
        work, itemsize = self.work, self.work.compute_itemsize
        if work.degrees.pp == 1 and work.frees_after_forward:
            num_blocks = min(2 if work.degrees.fsdp > 1 else 1, work.sizes.num_layers)
            return itemsize * (work.root(self.stages[0]).numel + num_blocks * work.block.numel)
        by_stage = sorted((sum(unit.numel for unit in _units(work, stage)) for stage in self.stages), reverse=True)
        most = len(by_stage) if work.degrees.pp == 1 or work.parallel.schedule in SINGLE else MANAGED_STAGES
        return itemsize * sum(by_stage[:most])

    @property
    def buffers(self) -> int:
        """A pipeline's for each micro-batch: a stage's input and its gradient, and the gradient of its output."""
        num_streams = sum(2 * (not stage.is_first) + (not stage.is_last) for stage in self.stages)
        return self.kept.stream * self.work.num_micro_batches * num_streams if self.work.degrees.pp > 1 else 0

    def _kept(self, stage: Stage) -> int:
        """Activations of one micro-batch in one stage, beside the buffers."""
        total = len(stage.layers) * self.kept.block(self.work.parallel.recompute)
        total += self.kept.token_ids * (stage.is_first or stage.is_last)
        if stage.is_last:
            total += self.kept.head
        elif self.work.stage_ranks[stage.index + 1] != self.pp_rank:
            # What was sent stays until its gradient is back.
            total += self.kept.stream
        return total - self.kept.stream * (not stage.is_first and self.kept.keeps_input)

    def moments(self) -> list[_Moment]:
        """Those of a step of which one is the worst."""
        stages = {stage.index: stage for stage in self.stages}
        num_backwards = dict.fromkeys(stages, 0)
        loss = loss_memory(self.work)
        held = losses = 0
        moments: list[_Moment] = []
        for action in self.work.orders[self.pp_rank]:
            stage = stages[action.stage]
            gradients = sum(self._whole_gradients(stages[index]) for index, number in num_backwards.items() if number)
            if action.kind == "forward":
                held += self._kept(stage)
                moments.append(_Moment(held, gradients, losses * loss.kept + loss.forward * stage.is_last))
                losses += stage.is_last
                continue
            if action.kind != "weight_backward":
                now = _Moment(held, gradients, losses * loss.kept)
                moments += self._backward(stage, now, num_backwards[action.stage])
            if action.kind != "backward":
                split = self.kept.split_backward * len(stage.layers) + loss.kept * stage.is_last
                held += split if action.kind == "input_backward" else -split
                moments.append(_Moment(held, gradients, losses * loss.kept))
            if action.kind != "input_backward":
                held -= self._kept(stage)
                losses -= stage.is_last
                num_backwards[action.stage] += 1
        return moments

    def _whole_gradients(self, stage: Stage) -> int:
        return FP32 * sum(unit.numel for unit in _units(self.work, stage))

    def _backward(self, stage: Stage, now: _Moment, number: int) -> list[_Moment]:
        """Of a stage's micro-batch `number`: the loss's, then each layer's, from the last to the first.

        The first micro-batch makes the gradients, in the last one each layer shards its own.
        """
        work, recompute = self.work, self.work.parallel.recompute
        block, shard = FP32 * work.block.numel, FP32 * work.block.shard_numel(work.degrees.fsdp)
        # A pipeline shards a stage's gradients when all is done.
        is_first, is_last = number == 0, number == work.num_micro_batches - 1 and work.degrees.pp == 1
        loss = loss_memory(work).kept * stage.is_last
        moments = [replace(now, loss=now.loss + loss)]
        # The root's gradients wait for the end.
        gradients = now.gradients + work.compute_itemsize * work.root(stage).numel * is_first
        for done in range(len(stage.layers) if is_first or is_last else 1):
            made = done * block * is_first
            # The layer before is still being sent, from a buffer of its own.
            reduced = (done * (shard - block) + min(done, 1) * block) * is_last
            moments.append(
                _Moment(
                    activations=now.activations - done * self.kept.block(recompute),
                    gradients=gradients + made + reduced,
                    loss=now.loss - loss,
                    working=self.kept.backward(recompute),
                )
            )
        if is_last:
            root, root_shard = work.root(stage).numel, work.root(stage).shard_numel(work.degrees.fsdp)
            own = root * (work.compute_itemsize if is_first else FP32)
            moments.append(_Moment(0, len(stage.layers) * shard + own + FP32 * (root + root_shard)))
        return moments
