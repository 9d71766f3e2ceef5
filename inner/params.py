"""A mesh-independent view of a model's parameters: full names and shapes, and the rectangles that
this rank holds.

Only this file unwraps DTensors. A parameter is seen as a matrix (shape[0], product of the rest); a
1-D parameter is (n, 1), a 0-d parameter (1, 1). The matrices of a mixture's experts are one tensor
in the model, and each of them is a parameter here (inner/expert_names.py). The slices of one
replica's ranks cover the model exactly once.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from inner.expert_names import expert_name, find_expert, is_stacked
from inner.param_spec import ParamSlice, ParamSpec


class LocalParams:
    """Reads and writes this rank's slices of the live parameters. Build it once, before the first forward.

    >>> model = nn.Linear(2, 3, bias=False)
    >>> params = LocalParams(whole=model, stages=[model])
    >>> params.slices
    [ParamSlice(name='weight', rows=(0, 3), cols=(0, 2))]
    >>> params.write(0, torch.ones(3, 2))
    >>> params.read(0).sum()
    tensor(6.)
    """

    specs: list[ParamSpec]
    """All parameters of the model in its own order, the same on every rank. Tied weights occur once."""
    slices: list[ParamSlice]
    """The slices that this rank holds, in the order of `specs`. Parameters of which it holds
    nothing are left out."""

    def __init__(self, whole: nn.Module, stages: Sequence[nn.Module], names: Collection[str] | None = None) -> None:
        """Build the view. `whole` is the full model, possibly on the meta device; `stages` are the
        stages that this rank holds.

        With `names` the view is limited to these parameters.
        """
        self.specs = []
        self.slices = []
        # FSDP swaps the modules' parameters while it computes. These references remain the sharded
        # fp32 masters.
        self._copies: list[list[Tensor]] = []
        self._parts: list[int | None] = []
        """For each slice, its index in the first dimension of this rank's shard; None: it is the
        whole shard."""
        held: dict[str, list[Tensor]] = defaultdict(list)
        for stage in stages:
            for name, param in stage.named_parameters():
                held[name].append(param)
        for name, param in whole.named_parameters():
            if names is None or name in names:
                self._add(name, param, held.get(name))

    def _add(self, name: str, param: Tensor, copies: list[Tensor] | None) -> None:
        """Add a parameter of the whole model, of which this rank holds shards in `copies`."""
        if not is_stacked(name, param.ndim):
            spec = ParamSpec(name, tuple(param.shape))
            self.specs.append(spec)
            if copies:
                self._add_slice(_slice(spec, copies[0]), copies, None)
            return
        shape = tuple(param.shape[1:])
        specs = [ParamSpec(expert_name(name, number), shape) for number in range(param.shape[0])]
        self.specs += specs
        if copies:
            held, rows = _shard_of_stack(name, tuple(param.shape), copies[0])
            for part, number in enumerate(range(*held)):
                self._add_slice(ParamSlice(specs[number].name, rows, (0, shape[1])), copies, part)

    def _add_slice(self, held: ParamSlice, copies: list[Tensor], part: int | None) -> None:
        if min(held.shape) > 0:
            self.slices.append(held)
            self._copies.append(copies)
            self._parts.append(part)

    def copies(self, index: int) -> Sequence[Tensor]:
        """Return the live parameters that slice `index` belongs to. A tied parameter has
        several.
        """
        return self._copies[index]

    def local_view(self, index: int, tensor: Tensor) -> Tensor:
        """Return the part of this rank's shard of `tensor` that slice `index` is, in the memory of the
        shard. `tensor`: a live parameter of that slice, or an optimizer's state of it.
        """
        local = local_tensor(tensor)
        part = self._parts[index]
        return local if part is None else local[part]

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
            named |= {expert_name(name, number): matrix for number, matrix in enumerate(tensor.unbind())}
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
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=_can_pin(tensor)) for tensor in tensors]
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


def _shard_of_stack(name: str, shape: tuple[int, ...], param: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the half-open ranges of experts, and of the rows of each, in this rank's shard of a
    stack of experts.
    """
    assert tuple(param.shape) == shape, f"{name} has shape {tuple(param.shape)} in a stage, {shape} in the model"
    local_shape: tuple[int, ...] = shape
    offset: tuple[int, ...] = (0,) * len(shape)
    if isinstance(param, DTensor):
        local_shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    assert local_shape[2] == shape[2], f"{name}: experts may be sharded by expert and by row only"
    return (offset[0], offset[0] + local_shape[0]), (offset[1], offset[1] + local_shape[1])


def _slice(spec: ParamSpec, param: Tensor) -> ParamSlice:
    """Return the rectangle of this rank's shard. It may be empty if there are more ranks than
    rows.
    """
    name = spec.name
    assert tuple(param.shape) == spec.shape, (
        f"{name} has shape {tuple(param.shape)} in a stage, {spec.shape} in the model"
    )
    local_shape: tuple[int, ...] = tuple(param.shape)
    offset: tuple[int, ...] = (0,) * param.ndim
    if isinstance(param, DTensor):
        local_shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        assert local_shape == tuple(param.to_local().shape), f"{name}: {local_shape}, {param.placements}"
    rest = tuple(param.shape[1:])
    if param.ndim != 2:
        assert local_shape[1:] == rest, f"{name}: only matrices may be sharded past their first dim"
        cols = (0, math.prod(rest))
    else:
        cols = (offset[1], offset[1] + local_shape[1])
    assert param.dtype == torch.float32, f"{name}: master weights must be fp32, got {param.dtype}"
    first, num_rows = (offset[0], local_shape[0]) if param.ndim else (0, 1)
    return ParamSlice(name, rows=(first, first + num_rows), cols=cols)
