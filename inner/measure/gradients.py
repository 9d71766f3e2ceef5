"""Memory of the gradients that a stage of a model has on a rank, in bytes. No torch here."""

from dataclasses import dataclass

from inner.measure.activations import FP32
from inner.measure.workload import FsdpParamGroup, Workload
from inner.model.stage import Stage


@dataclass(frozen=True)
class StageGradients:
    """Gradients of a stage at one of its backwards, in bytes.

    Those of the root come first, then those of the layers from the last to the first, then those of the embedding. A
    tied table has gradients from both ends, so the root's are complete at the end only.
    """

    work: Workload
    stage: Stage
    number: int
    """Number of earlier backwards of the stage."""

    @property
    def before(self) -> int:
        """What earlier backwards have left."""
        groups = self.work.param_groups(self.stage)
        return sum(map(self._left, groups)) + self._kept_buffer

    @property
    def at_root(self) -> int:
        """When the root's gradients are there."""
        if self.work.sizes.tie_embeddings:
            return self.before
        return self._of_layers(0) + self._left(self._embedding) + self._in_reduction(self._root)

    def after(self, num_layers: int) -> int:
        """When the last `num_layers` layers of the stage are done, and the next one is not."""
        if self.work.sizes.tie_embeddings:
            ends = self._own(self._root) + self._left(self._root)
        else:
            ends = self._done(self._root) + self._left(self._embedding)
        return self._of_layers(num_layers) + ends + self._buffer(num_layers)

    @property
    def at_end(self) -> int:
        """When the last gradients are there."""
        last, other = self._ends
        return self._of_layers(len(self.stage.layers)) + self._done(other) + self._in_reduction(last)

    @property
    def all_at_once(self) -> int:
        """At the end of the weights' half of a split backward."""
        groups = self.work.param_groups(self.stage)
        own = self.work.compute_itemsize * self.work.numel(self.stage) * self._is_apart
        return sum(map(self._left, groups)) + own + FP32 * self.work.block.numel * self._is_reduced

    @property
    def _embedding(self) -> FsdpParamGroup:
        return self.work.embedding(self.stage)

    @property
    def _root(self) -> FsdpParamGroup:
        return self.work.root(self.stage)

    @property
    def _ends(self) -> tuple[FsdpParamGroup, FsdpParamGroup]:
        """The group whose gradients are complete last, and the other one outside the layers."""
        is_tied = self.work.sizes.tie_embeddings
        return (self._root, self._embedding) if is_tied else (self._embedding, self._root)

    @property
    def _is_reduced(self) -> bool:
        if self.work.degrees.num_copies == 1:
            return False
        return self.work.reduces_each_micro_batch or self.number == self.work.num_micro_batches - 1

    @property
    def _is_apart(self) -> bool:
        """Whether gradients come in tensors of their own, in the compute dtype; others are added to those in fp32."""
        return self.number == 0 or self.work.reduces_each_micro_batch or self.work.compute_itemsize < FP32

    @property
    def _kept_buffer(self) -> int:
        """The buffer from which the last group was sent, which FSDP keeps until the next backward in a pipeline."""
        if self.number == 0 or self.work.degrees.pp == 1 or not self.work.reduces_each_micro_batch:
            return 0
        return FP32 * (self._ends[0].numel or self.work.block.numel)

    def _buffer(self, num_layers: int) -> int:
        """The buffer from which the group before is being sent when `num_layers` layers are done."""
        if num_layers == 0 and (self.work.sizes.tie_embeddings or self._root.numel == 0):
            return self._kept_buffer
        sent = self.work.block if num_layers else self._root
        return FP32 * sent.numel * self._is_reduced

    def _left(self, group: FsdpParamGroup) -> int:
        """Gradients of a group from earlier backwards."""
        if self.number == 0:
            return 0
        return FP32 * group.shard_numel(self.work.degrees.fsdp if self.work.reduces_each_micro_batch else 1)

    def _done(self, group: FsdpParamGroup) -> int:
        """Gradients of a group after this backward."""
        return FP32 * group.shard_numel(self.work.degrees.fsdp if self._is_reduced else 1)

    def _own(self, group: FsdpParamGroup) -> int:
        """Gradients of a group as they come from this backward."""
        if self.work.degrees.num_copies == 1:
            # Each is added to that of the master at once.
            return FP32 * group.numel * (self.number == 0)
        return self.work.compute_itemsize * group.numel * self._is_apart

    def _in_reduction(self, group: FsdpParamGroup) -> int:
        """The most that a group takes while it is reduced: its gradients, whole in fp32, and their sums."""
        if not self._is_reduced:
            return max(self._left(group) + self._own(group), self._done(group))
        if self._left(group) and not self.work.reduces_each_micro_batch:
            own = self._left(group)  # They have added up whole.
            return FP32 * group.numel + own
        shard = FP32 * group.shard_numel(self.work.degrees.fsdp)
        # FSDP holds the last gradient of a group until the group is reduced; that of an untied table is nearly all.
        own = max(self._own(group) - shard, 0) if self.work.sizes.tie_embeddings else self._own(group)
        return self._left(group) + FP32 * group.numel + own + shard

    def _of_layers(self, num_done: int) -> int:
        num_left = len(self.stage.layers) - num_done
        return num_done * self._done(self.work.block) + num_left * self._left(self.work.block)
