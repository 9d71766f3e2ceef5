"""Memory of the gradients of a model's stage on a rank, in bytes. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from inner.measure.workload import FP32, FsdpParamGroup, Workload
from inner.model.stage import Stage


class StageGradients(Protocol):
    """Gradients of a stage during one of its backwards, in bytes."""

    @property
    def before(self) -> int:
        """Bytes of the gradients that earlier backwards have left."""
        ...

    @property
    def at_root(self) -> int:
        """Bytes when the root's gradients have been computed."""
        ...

    def after(self, num_layers: int) -> int:
        """Return the bytes when the last `num_layers` layers of the stage are done, and the next
        layer is not.
        """
        ...

    @property
    def at_end(self) -> int:
        """Bytes when the last gradients have been computed."""
        ...

    @property
    def all_at_once(self) -> int:
        """Bytes at the end of the weights' half of a split backward, where all gradients exist at
        once.
        """
        ...


def stage_gradients(work: Workload, stage: Stage, number: int) -> StageGradients:
    """Return the gradients of a stage in a backward. `number`: how many it has already run."""
    kind = BucketGradients if work.has_whole_weights else GroupGradients
    return kind(work, stage, number)


@dataclass(frozen=True)
class BucketGradients:
    """Gradients of replicas with whole weights. A bucket has memory from its first gradient on, and
    keeps it until the step ends.
    """

    work: Workload
    stage: Stage
    number: int
    """Number of backwards that the stage has already run."""

    @property
    def before(self) -> int:
        """See StageGradients, here and below."""
        return self._begun(0)

    @property
    def at_root(self) -> int:
        return self._begun(self._ends) + self._own(self.work.root(self.stage))

    def after(self, num_layers: int) -> int:
        layers = self.stage.layers
        done = layers[len(layers) - num_layers :]
        groups = [
            group
            for layer in done
            for group in self.work.layer_groups(self.work.sizes.has_experts(layer))
        ]
        return self._begun(self._ends + FP32 * sum(group.numel for group in groups))

    @property
    def at_end(self) -> int:
        last = (
            self.work.root(self.stage)
            if self.work.sizes.tie_embeddings
            else self.work.embedding(self.stage)
        )
        return sum(self.work.gradient_buckets(self.stage)) + self._own(last)

    @property
    def all_at_once(self) -> int:
        # The gradients of the copies exist beside the buckets.
        groups = self.work.param_groups(self.stage)
        return sum(self.work.gradient_buckets(self.stage)) + self.work.compute_bytes(groups)

    @property
    def _ends(self) -> int:
        """Bytes of the gradients of the last norm and of a head of its own."""
        table = self.work.table.numel * (not self.work.sizes.tie_embeddings)
        return FP32 * (self.work.sizes.dim + table) * self.stage.is_last

    def _begun(self, done: int) -> int:
        """Return the bytes of the buckets that have memory when gradients of `done` bytes are
        complete.
        """
        buckets = self.work.gradient_buckets(self.stage)
        if self.number > 0:
            return sum(buckets)
        first_bytes = accumulate(buckets, initial=0)
        return sum(size for size, first in zip(buckets, first_bytes, strict=False) if first < done)

    def _own(self, group: FsdpParamGroup) -> int:
        """Return the bytes of a group's gradients before they are copied into a bucket."""
        return self.work.itemsize(group) * group.numel


@dataclass(frozen=True)
class GroupGradients:
    """Gradients of a stage during one of its backwards, in bytes.

    The root's gradients come first, then the layers' from the last to the first, then
    the embedding's. A tied table has gradients from both ends, so the root's gradients are
    complete only at the end.
    """

    work: Workload
    stage: Stage
    number: int
    """Number of backwards that the stage has already run."""

    @property
    def before(self) -> int:
        """Bytes of the gradients that earlier backwards have left."""
        groups = self.work.param_groups(self.stage)
        return sum(map(self._left, groups)) + self._kept_buffer

    @property
    def at_root(self) -> int:
        """Bytes when the root's gradients have been computed."""
        if self.work.sizes.tie_embeddings:
            return self.before
        return self._of_layers(0) + self._left(self._embedding) + self._in_reduction(self._root)

    def after(self, num_layers: int) -> int:
        """Return the bytes when the last `num_layers` layers of the stage are done, and the next
        layer is not.
        """
        if self.work.sizes.tie_embeddings:
            ends = self._own(self._root) + self._left(self._root)
        else:
            ends = self._done(self._root) + self._left(self._embedding)
        return self._of_layers(num_layers) + ends + self._buffer(num_layers)

    @property
    def at_end(self) -> int:
        """Bytes when the last gradients have been computed."""
        last, other = self._ends
        return (
            self._of_layers(len(self.stage.layers)) + self._done(other) + self._in_reduction(last)
        )

    @property
    def all_at_once(self) -> int:
        """Bytes at the end of the weights' half of a split backward, where all gradients exist at
        once.
        """
        groups = self.work.param_groups(self.stage)
        own = self.work.compute_bytes(groups) * self._is_apart
        largest = max(self._sent_last(layer).numel for layer in self.stage.layers)
        return sum(map(self._left, groups)) + own + FP32 * largest * self._is_reduced

    @property
    def _embedding(self) -> FsdpParamGroup:
        return self.work.embedding(self.stage)

    @property
    def _root(self) -> FsdpParamGroup:
        return self.work.root(self.stage)

    @property
    def _ends(self) -> tuple[FsdpParamGroup, FsdpParamGroup]:
        """The group whose gradients are complete last, and the other group outside the layers."""
        is_tied = self.work.sizes.tie_embeddings
        return (self._root, self._embedding) if is_tied else (self._embedding, self._root)

    @property
    def _is_reduced(self) -> bool:
        if not self.work.uses_fsdp:
            return False
        return self.work.reduces_each_micro_batch or self.number == self.work.num_micro_batches - 1

    @property
    def _is_apart(self) -> bool:
        """Whether new gradients are separate tensors in the compute dtype, and not added to the
        fp32 gradients at once.
        """
        return (
            self.number == 0
            or self.work.reduces_each_micro_batch
            or self.work.compute_itemsize < FP32
        )

    @property
    def _kept_buffer(self) -> int:
        """Bytes of the buffer from which the last group was sent. In a pipeline, FSDP keeps it
        until the next backward.
        """
        if self.number == 0 or self.work.degrees.pp == 1 or not self.work.reduces_each_micro_batch:
            return 0
        return FP32 * (self._ends[0].numel or self._sent_last(self.stage.layers[0]).numel)

    def _buffer(self, num_layers: int) -> int:
        """Return the bytes of the buffer from which FSDP is sending the previous group when
        `num_layers` layers are done.
        """
        if num_layers == 0 and (self.work.sizes.tie_embeddings or self._root.numel == 0):
            return self._kept_buffer
        sent = self._sent_last(self.stage.layers[-num_layers]) if num_layers else self._root
        return FP32 * sent.numel * self._is_reduced

    def _left(self, group: FsdpParamGroup) -> int:
        """Return the bytes of a group's gradients from earlier backwards."""
        if self.number == 0:
            return 0
        return FP32 * (group.shard_numel if self.work.reduces_each_micro_batch else group.numel)

    def _done(self, group: FsdpParamGroup) -> int:
        """Return the bytes of a group's gradients after this backward."""
        return FP32 * (group.shard_numel if self._is_reduced else group.numel)

    def _own(self, group: FsdpParamGroup) -> int:
        """Return the bytes of a group's gradients from this backward, before they are reduced."""
        if not self.work.uses_fsdp:
            # Each gradient is added to the gradient of its fp32 master at once.
            return FP32 * group.numel * (self.number == 0)
        return self.work.itemsize(group) * group.numel * self._is_apart

    def _in_reduction(self, group: FsdpParamGroup) -> int:
        """Return the peak bytes of a group while it is reduced: its gradients, a whole fp32 copy,
        and their sums.
        """
        if not self._is_reduced:
            return max(self._left(group) + self._own(group), self._done(group))
        if self._left(group) and not self.work.reduces_each_micro_batch:
            own = self._left(
                group
            )  # Earlier micro-batches have left whole gradients, which are reduced now.
            return FP32 * group.numel + own
        shard = FP32 * group.shard_numel
        # FSDP holds the last gradient of a group until the group is reduced. For an untied table
        # this is nearly the whole group.
        own = (
            max(self._own(group) - shard, 0) if self.work.sizes.tie_embeddings else self._own(group)
        )
        return self._left(group) + FP32 * group.numel + own + shard

    def _of_layers(self, num_done: int) -> int:
        """Return the bytes when the last `num_done` layers of the stage are done."""
        layers = self.stage.layers
        border = len(layers) - num_done
        return self._of_kinds(layers[border:], self._done) + self._of_kinds(
            layers[:border], self._left
        )

    def _of_kinds(self, layers: range, size_of: Callable[[FsdpParamGroup], int]) -> int:
        """Return the bytes of all groups of some layers."""
        return sum(
            count * sum(map(size_of, self.work.layer_groups(has_experts)))
            for has_experts, count in self.work.sizes.layer_kinds(layers)
        )

    def _sent_last(self, layer: int) -> FsdpParamGroup:
        """Return the group of a layer that the backward reduces last."""
        return self.work.layer_groups(self.work.sizes.has_experts(layer))[-1]
