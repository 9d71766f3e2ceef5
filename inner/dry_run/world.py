"""Make this process one rank of an island of any size. The other ranks do not exist, and
collectives do nothing.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, placement_types
from torch.distributed.tensor import _utils as tensor_utils
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

from inner.dry_run.accelerator import DEVICE_TYPE, register
from inner.dry_run.kernels import choose_as_cuda_does

BACKEND = "dryrun"
_MESH_METHODS = (
    "__init__",
    "__getitem__",
    "_compute_coordinates_from_mesh",
    "_flatten",
    "get_coordinate",
    "get_local_rank",
)
_TO_EMPTY = nn.Module.to_empty
_SHARD_METHODS = ("local_shard_size_and_offset", "_local_shard_size_and_offset")


def enter_world(num_ranks: int, rank: int) -> None:
    """Become rank `rank` of `num_ranks` for the rest of this process. Raises InputError like
    `register`.
    """
    register()
    choose_as_cuda_does()
    _patch_torch()
    dist.Backend.register_backend(
        BACKEND, _build_group, extended_api=True, devices=["cpu", DEVICE_TYPE]
    )
    backends = f"cpu:{BACKEND},{DEVICE_TYPE}:{BACKEND}"
    dist.init_process_group(backends, rank=rank, world_size=num_ranks, store=FakeStore())


@contextmanager
def without_values() -> Iterator[None]:
    """Give new tensors inside the block shapes but no values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Without this, torch.tensor(x, device=...) would create a real tensor on a device that has
        # no memory.
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


def _build_group(common: Any, options: Any) -> Any:
    return _create_fake_pg(common, options)


def _patch_torch() -> None:
    """Let the parts of torch that need values compute with real tensors: meshes and the bounds of
    shards.
    """
    for name in _MESH_METHODS:
        _with_values(DeviceMesh, name)
    DeviceMesh.mesh = property(_real(DeviceMesh.mesh.fget))  # pyright: ignore - a property of the class
    for kind in (placement_types._StridedShard, placement_types.Shard):
        for name in _SHARD_METHODS:
            _with_values(kind, name)
    function = tensor_utils._compute_local_shape_and_global_offset
    tensor_utils._compute_local_shape_and_global_offset = _real(function)
    schedules._PipelineSchedule._warmup_p2p = _assume_static_shapes
    nn.Module.to_empty = _to_empty


def _with_values(kind: type, name: str) -> None:
    found = kind.__dict__.get(name)
    if isinstance(found, staticmethod):
        setattr(kind, name, staticmethod(_real(found.__func__)))
    elif found is not None:
        setattr(kind, name, _real(found))


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **options)

    return call


def _to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
    """Replace Module.to_empty, which swaps the contents of tensors; plain tensors without values do
    not support that.
    """
    if any(isinstance(param, DTensor) for param in self.parameters()):
        return _TO_EMPTY(self, device=device, recurse=recurse)
    for module in self.modules():
        for name, param in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(torch.empty_like(param, device=device)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
    return self


def _assume_static_shapes(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
    """Replace the exchange in which neighbouring stages send each other their shapes. No other rank
    would answer.
    """
    # Imported here because torch 2.11 does not have it, and never calls this function.
    from torch.distributed.pipelining.stage import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
