"""Whole weights on each of several ranks (ZeRO-0): gradients are summed in flat buckets while the
backward still runs.

The masters are DTensors that are replicated over the mesh, so that checkpoints, norms, optimizers
and the view of a model by names see the mesh. The computation does not: see compute_copies.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from inner.parallel.weights.zero_stage import cut_buckets
from inner.params import local_tensor


def replicate(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every parameter a DTensor on `mesh`, which is IslandMesh.copies, with all of it on each
    rank. It sends nothing. Call it after tensor parallelism.
    """
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(_replicated(param, mesh)))


def _replicated(param: Tensor, mesh: DeviceMesh) -> Tensor:
    placements = param.placements if isinstance(param, DTensor) else ()
    num_axes = mesh.ndim - len(placements)
    whole = [*(Replicate() for _ in range(num_axes)), *placements]
    return _as_dtensor(local_tensor(param), param, mesh, whole)


def without_replicas(master: DTensor, values: Tensor) -> Tensor:
    """Return `values`, this rank's part of `master`, as a module computes with them: a DTensor on
    the mesh of tp, or a plain tensor without tensor parallelism.
    """
    axes = master.device_mesh.mesh_dim_names
    assert axes is not None, "an island's mesh has names"
    if axes[-1] != "tp":
        return values
    return _as_dtensor(values, master, master.device_mesh["tp"], master.placements[-1:])


def _as_dtensor(
    values: Tensor, whole: Tensor, mesh: DeviceMesh, placements: Sequence[Any]
) -> DTensor:
    """Return `values` as this rank's part of a DTensor of the shape of `whole`."""
    return DTensor.from_local(
        values, mesh, placements, run_check=False, shape=whole.shape, stride=tuple(whole.stride())
    )


class ReplicaSums:
    """Sums the gradients of all stages of a rank over the ranks that hold the same weights, once
    per step.

    All of these ranks must make each call together, and run the same backwards.
    """

    def __init__(self, stages: Sequence[nn.Module], group: ProcessGroup) -> None:
        """Put the parameters of each stage into buckets. No memory is allocated here."""
        self._stages = {stage: _StageSums(stage, group) for stage in stages}
        self._stage_of = {
            param: sums for stage, sums in self._stages.items() for param in stage.parameters()
        }

    def begin_backward(self, stage: nn.Module, *, is_last: bool) -> None:
        """Announce a backward of a stage. In the last one of a step, buckets are sent as soon as
        they are complete.
        """
        self._stages[stage].is_last = is_last

    def add(self, master: nn.Parameter, grad: Tensor) -> None:
        """Add the gradient of one backward, of any dtype, to that of the step."""
        self._stage_of[master].add(master, local_tensor(grad))

    def finish(self) -> None:
        """Wait for the sums, and give every parameter its gradient."""
        for sums in self._stages.values():
            sums.finish()


class _StageSums:
    """The buckets of one stage. They are sent in the same order on all ranks."""

    def __init__(self, stage: nn.Module, group: ProcessGroup) -> None:
        self.is_last = False
        groups = list(_in_order_of_backward(stage))
        sizes = [sum(local_tensor(param).nbytes for param in params) for params in groups]
        buckets = [
            [param for index in indices for param in groups[index]]
            for indices in cut_buckets(sizes)
        ]
        self._buckets = [_Bucket(params, group) for params in buckets]
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.places}
        self._num_sent = 0

    def add(self, master: nn.Parameter, grad: Tensor) -> None:
        self._bucket_of[master].add(master, grad, is_last=self.is_last)
        while self._num_sent < len(self._buckets) and self._buckets[self._num_sent].is_complete:
            self._buckets[self._num_sent].send()
            self._num_sent += 1

    def finish(self) -> None:
        # Some pipeline schedules drop gradients silently.
        assert self._num_sent == len(self._buckets), (
            "a parameter got no gradient in the last backward of the step"
        )
        for bucket in self._buckets:
            bucket.finish()
        self._num_sent = 0


class _Bucket:
    """Gradients of some parameters in one flat fp32 tensor. It has memory only from the first
    gradient of a step until the parameters lose theirs.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        self.places = {param: index for index, param in enumerate(params)}
        self._group = group
        self._sizes = [local_tensor(param).numel() for param in params]
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._with_values: set[nn.Parameter] = set()
        self._num_missing = len(params)
        self._work: dist.Work | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of the last backward are in it."""
        return self._num_missing == 0

    def add(self, param: nn.Parameter, grad: Tensor, *, is_last: bool) -> None:
        if self._flat is None:
            self._allocate(grad.device)
        view = self._views[self.places[param]]
        if param in self._with_values:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._with_values.add(param)
        self._num_missing -= is_last

    def _allocate(self, device: torch.device) -> None:
        self._flat = torch.empty(sum(self._sizes), dtype=torch.float32, device=device)
        pieces = self._flat.split(self._sizes)
        self._views = [
            piece.view(local_tensor(param).shape)
            for piece, param in zip(pieces, self.places, strict=True)
        ]

    def send(self) -> None:
        assert self._flat is not None, "a complete bucket has memory"
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for the sum, give the parameters their gradients, and forget them."""
        assert self._work is not None, "send() must come first"
        self._work.wait()
        for param, view in zip(self.places, self._views, strict=True):
            assert isinstance(param, DTensor), "masters of replicas are DTensors"
            param.grad = _as_dtensor(view, param, param.device_mesh, param.placements)
        self._flat = None
        self._views = []
        self._with_values = set()
        self._num_missing = len(self.places)
        self._work = None


def _in_order_of_backward(stage: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in groups, about in the order in which a backward computes their
    gradients: the last norm and the head, the layers from the last to the first, and the rest.
    """
    ends: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    layers: dict[str, list[nn.Parameter]] = {}
    for name, param in stage.named_parameters():
        first, _, rest = name.partition(".")
        if first == "layers":
            layers.setdefault(rest.partition(".")[0], []).append(param)
        elif first in ("norm", "head"):
            ends.append(param)
        else:
            others.append(param)
    yield from (group for group in (ends, *reversed(layers.values()), others) if group)
