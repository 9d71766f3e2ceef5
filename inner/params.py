"""A mesh-independent view of a model's parameters: full names and shapes, and the rectangles that
this rank holds.

Only this file unwraps DTensors. A parameter is seen as a matrix (product of all dimensions but the
last, the last); a 1-D parameter is (n, 1), a 0-d parameter (1, 1). A rank's shard of it is one
slice or several (inner/param_spec.py). The matrices of a mixture's experts are one tensor in the
model, and each of them is a parameter here (inner/expert_names.py). The slices of one replica's
ranks cover the model exactly once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from inner.expert_names import expert_name, find_expert, is_stacked
from inner.param_spec import HeldRange, Index, ParamSlice, ParamSpec, cut_shard

Split = tuple[Shard | _StridedShard, int, int]
"""One division of a dimension: its placement, the number of ranks, and this rank's number."""


class LocalParams:
    """Reads and writes this rank's slices of the live parameters. Build it once, before the first
    forward.

    >>> model = nn.Linear(2, 3, bias=False)
    >>> params = LocalParams(whole=model, stages=[model])
    >>> params.slices
    [ParamSlice(name='weight', rows=(0, 3), cols=(0, 2))]
    >>> params.write(0, torch.ones(3, 2))
    >>> params.read(0).sum()
    tensor(6.)
    """

    specs: list[ParamSpec]
    """All parameters of the model in its own order, the same on every rank. Tied weights occur
    once.
    """
    slices: list[ParamSlice]
    """The slices that this rank holds, in the order of `specs`. Parameters of which it holds
    nothing are left out."""

    def __init__(self, whole: nn.Module, stages: Sequence[nn.Module]) -> None:
        """Build the view. `whole` is the full model, possibly on the meta device; `stages` are the
        stages that this rank holds.
        """
        held: dict[str, list[Tensor]] = defaultdict(list)
        for stage in stages:
            for name, param in stage.named_parameters():
                held[name].append(param)
        self._hold({name: tuple(param.shape) for name, param in whole.named_parameters()}, held)

    @classmethod
    def of_tensors(
        cls, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, Sequence[Tensor]]
    ) -> "LocalParams":
        """Return the view of a model that no rank has as a module.

        `shapes`: of all parameters of the model, in its order. `held`: this rank's shards, by name;
        several if a parameter is tied.
        """
        params = cls.__new__(cls)
        params._hold(shapes, held)
        return params

    def _hold(
        self, shapes: Mapping[str, tuple[int, ...]], held: Mapping[str, Sequence[Tensor]]
    ) -> None:
        self.specs = []
        self.slices = []
        # FSDP swaps the modules' parameters while it computes. These references remain the sharded
        # fp32 masters.
        self._copies: list[Sequence[Tensor]] = []
        self._indices: list[Index] = []
        """For each slice, its index in this rank's shard."""
        for name, shape in shapes.items():
            self._add(name, shape, held.get(name, ()))

    def _add(self, name: str, shape: tuple[int, ...], copies: Sequence[Tensor]) -> None:
        """Add a parameter of the whole model, of which this rank holds shards in `copies`."""
        held = find_held(name, shape, copies[0]) if copies else None
        if not is_stacked(name, len(shape)):
            spec = ParamSpec(name, shape)
            self.specs.append(spec)
            if held is not None:
                self._add_slices(spec, held, copies, ())
            return
        specs = [ParamSpec(expert_name(name, number), shape[1:]) for number in range(shape[0])]
        self.specs += specs
        for experts in held[0] if held is not None else ():
            for number in range(experts.first, experts.end):
                assert held is not None
                self._add_slices(
                    specs[number], held[1:], copies, (number - experts.first + experts.at,)
                )

    def _add_slices(
        self,
        spec: ParamSpec,
        held: Sequence[Sequence[HeldRange]],
        copies: Sequence[Tensor],
        within: Index,
    ) -> None:
        """Add the slices of a parameter that is the part `within` of this rank's shards."""
        for part, index in cut_shard(spec, held):
            if min(part.shape) > 0:
                self.slices.append(part)
                self._copies.append(copies)
                self._indices.append((*within, *index))

    def copies(self, index: int) -> Sequence[Tensor]:
        """Return the live parameters that slice `index` belongs to. A tied parameter has
        several.
        """
        return self._copies[index]

    def local_view(self, index: int, tensor: Tensor) -> Tensor:
        """Return the part of this rank's shard of `tensor` that slice `index` is, in the memory of
        the shard. `tensor`: a live parameter of that slice, or an optimizer's state of it.
        """
        return local_tensor(tensor)[self._indices[index]]

    def read(self, index: int) -> Tensor:
        """Return slice `index` as a 2-D fp32 CPU tensor, which may be a view if the live parameter
        is on the CPU.
        """
        return self.read_all([index])[index]

    def read_all(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Return slices by index, each like `read`. The host waits for an accelerator only once for
        all of them.
        """
        return read_to_host({index: self.matrix(index) for index in indices})

    def write(self, index: int, values: Tensor) -> None:
        """Copy `values` (2-D, shape of the slice) in place into the live parameter (all copies of a
        tied parameter).
        """
        target = self.slices[index]
        assert values.shape == target.shape, (
            f"{target.name}: got values of shape {tuple(values.shape)}, need {target.shape}"
        )
        for param in self._copies[index]:
            local = self.local_view(index, param)
            local.copy_(values.view(local.shape), non_blocking=True)

    def write_all(self, values: Mapping[int, Tensor]) -> None:
        """Write slices by index. The host does not wait for copies of values that lie in memory
        from `pinned`.
        """
        for index, new in values.items():
            self.write(index, new)

    def pinned(self, index: int) -> Tensor | None:
        """Return page-locked memory for new values of slice `index`; None if that is of no use, as
        on a CPU.
        """
        return pinned_like(self.matrix(index))

    def matrix(self, index: int) -> Tensor:
        """Return slice `index` in its own memory, 2-D fp32; a copy if the memory has another
        order.
        """
        return self.local_view(index, self._copies[index][0]).reshape(self.slices[index].shape)

    def live(self, index: int) -> Tensor | None:
        """Return slice `index` itself (2-D fp32), to be written in place, if it is on the CPU and
        has one copy; else None.
        """
        param, *others = self._copies[index]
        tensor = self.local_view(index, param)
        can_be_viewed = not others and tensor.device.type == "cpu" and tensor.is_contiguous()
        return tensor.view(self.slices[index].shape) if can_be_viewed else None


def unstack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors of a model by the names used here: a stack of experts as one matrix per
    expert, sharing its memory.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_stacked(name, tensor.ndim):
            named |= {
                expert_name(name, number): matrix for number, matrix in enumerate(tensor.unbind())
            }
        else:
            named[name] = tensor
    return named


def stack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors by the names of the model's modules: the inverse of `unstack`. Experts
    are copied.
    """
    named: dict[str, Tensor] = {}
    matrices: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        place = find_expert(name)
        if place is None:
            named[name] = tensor
        else:
            matrices[place[0]][place[1]] = tensor
    for name, by_number in matrices.items():
        named[name] = torch.stack([by_number[number] for number in range(len(by_number))])
    return named


def local_tensor(param: Tensor) -> Tensor:
    """Return this rank's shard of a parameter or gradient, detached but sharing its memory."""
    if not isinstance(param, DTensor):
        return param.detach()
    # Do not use detach() here, because it goes through DTensor's slow dispatch: this runs per
    # parameter and step.
    with torch.no_grad():
        return param.to_local()


def read_to_host(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the tensors on the CPU: copies of tensors on an accelerator, and CPU tensors
    themselves.
    """
    elsewhere = {key: tensor for key, tensor in tensors.items() if tensor.device.type != "cpu"}
    copies = copy_to_host(list(elsewhere.values()))
    return dict(tensors) | dict(zip(elsewhere, copies, strict=True))


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a CPU copy of each tensor, also of CPU tensors. DTensors stay DTensors.

    An accelerator writes all copies, into page-locked memory on CUDA, and the host waits once for
    all of them.
    """
    copies = [
        torch.empty_like(tensor, device="cpu", pin_memory=_can_pin(tensor)) for tensor in tensors
    ]
    for copy, tensor in zip(copies, tensors, strict=True):
        local_tensor(copy).copy_(local_tensor(tensor), non_blocking=True)
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.get_device_module(device).current_stream(device).synchronize()
    return copies


def pinned_like(tensor: Tensor) -> Tensor | None:
    """Return page-locked memory for the values of a CUDA tensor, None for other tensors. torch does
    not reuse the memory while a copy to the device still reads it.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=True) if _can_pin(tensor) else None


def _can_pin(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def find_held(name: str, shape: tuple[int, ...], param: Tensor) -> list[list[HeldRange]]:
    """Return for each dimension of a parameter the ranges that this rank's shard of it holds.

    They may be empty, for example if there are more ranks than rows.
    """
    assert tuple(param.shape) == shape, (
        f"{name} has shape {tuple(param.shape)} in a stage, {shape} in the model"
    )
    assert param.dtype == torch.float32, f"{name}: master weights must be fp32, got {param.dtype}"
    splits: list[list[Split]] = [[] for _ in shape]
    if isinstance(param, DTensor):
        coordinate = param.device_mesh.get_coordinate()
        if coordinate is None:
            return [[] for _ in shape]  # The parameter lies on a mesh of other ranks.
        for axis, placement in enumerate(param.placements):
            if isinstance(placement, Shard | _StridedShard):
                splits[placement.dim].append(
                    (placement, param.device_mesh.size(axis), coordinate[axis])
                )
    held = [_divide(size, tuple(each)) for size, each in zip(shape, splits, strict=True)]
    sizes = tuple(sum(each.end - each.first for each in ranges) for ranges in held)
    local = tuple(local_tensor(param).shape)
    assert sizes == local or 0 in sizes, (
        f"{name}: this rank's shard has the shape {local}, by its placements {sizes}"
    )
    return held


@lru_cache(maxsize=4096)
def _divide(size: int, splits: tuple[Split, ...]) -> list[HeldRange]:
    """Return the ranges of a dimension of this size that remain after the splits, in the shard's
    order.
    """
    numbers = np.arange(size)
    for placement, num_ranks, rank in splits:
        # A strided shard has a piece of each of `split_factor` chunks.
        num_chunks = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        chunks = [_chunk(numbers, num_chunks, number) for number in range(num_chunks)]
        numbers = np.concatenate([_chunk(chunk, num_ranks, rank) for chunk in chunks])
    if not len(numbers):
        return []
    starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()]
    ends = [*starts[1:], len(numbers)]
    return [
        HeldRange(int(numbers[start]), int(numbers[end - 1]) + 1, start)
        for start, end in zip(starts, ends, strict=True)
    ]


def _chunk(numbers: np.ndarray, num_chunks: int, index: int) -> np.ndarray:
    """Return a chunk as torch.chunk makes it: all have the same length, except for the last
    ones.
    """
    length = -(-len(numbers) // num_chunks)
    return numbers[index * length : (index + 1) * length]
