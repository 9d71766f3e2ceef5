"""Computation without FSDP: on a rank that alone has its weights, and on replicas with whole
weights.

The model's parameters are the fp32 masters. During computation, copies in the compute dtype replace
them. The gradient of each copy is added to its master's gradient in fp32 as soon as it is complete.
Masters of replicas are DTensors, and copies are without this wrapper; if they have the masters'
dtype, they are not copied, but share their memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from inner.parallel.weights.replicas import ReplicaSums, without_replicas
from inner.params import local_tensor


class _Pair(NamedTuple):
    """A parameter of a module and its copy."""

    module: nn.Module
    name: str
    master: nn.Parameter
    copy: nn.Parameter
    add: Callable[[Tensor], None]
    """Adds a gradient of the copy to that of the master."""


class ComputeCopies:
    """Inside `with copies:` the stages compute in `dtype`; outside they have their fp32 masters.

    Build it after the parameters have memory. The memory of the copies does not change, because
    compiled code refers to it.
    """

    def __init__(
        self, stages: Sequence[nn.Module], dtype: torch.dtype, sums: ReplicaSums | None = None
    ) -> None:
        """Create the copies. None are needed if the masters have that dtype, for modules that
        compute in fp32, or for stages under FSDP, which casts by itself. With `sums`, the masters
        are those of replicas, all have copies, and their gradients are summed.
        """
        self._sums = sums
        self._pairs = [
            _pair(
                module,
                name,
                param,
                param.dtype if getattr(module, "keeps_fp32", False) else dtype,
                sums,
            )
            for stage in stages
            if not isinstance(stage, FSDPModule)
            for module in stage.modules()
            for name, param in module.named_parameters(recurse=False)
            if sums is not None
            or (param.dtype != dtype and not getattr(module, "keeps_fp32", False))
        ]
        cast = [pair for pair in self._pairs if pair.copy.dtype != pair.master.dtype]
        self._masters = [local_tensor(pair.master) for pair in cast]
        self._copies = [local_tensor(pair.copy) for pair in cast]

    def __enter__(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)
        for pair in self._pairs:
            pair.module.register_parameter(pair.name, pair.copy)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pair in self._pairs:
            pair.module.register_parameter(pair.name, pair.master)

    def begin_backward(self, stage: nn.Module, *, is_last: bool) -> None:
        """Announce a backward of a stage. `is_last`: whether it is the stage's last in this
        step.
        """
        if self._sums is not None:
            self._sums.begin_backward(stage, is_last=is_last)

    def add_gradients(self) -> None:
        """Add gradients that no hook has added to their masters' gradients. A split backward calls
        no hooks.
        """
        for pair in self._pairs:
            if pair.copy.grad is not None:
                _take_gradient(pair.add, pair.copy)

    def finish_gradients(self) -> None:
        """Wait until gradients are summed over replicas. All replicas must call it after the last
        backward of a step.
        """
        if self._sums is not None:
            self._sums.finish()


def _pair(
    module: nn.Module, name: str, master: nn.Parameter, dtype: torch.dtype, sums: ReplicaSums | None
) -> _Pair:
    add = partial(_add_gradient, master) if sums is None else partial(sums.add, master)
    values = torch.empty_like(master, dtype=dtype) if sums is None else _values_like(master, dtype)
    copy = nn.Parameter(values)
    copy.register_post_accumulate_grad_hook(partial(_take_gradient, add))
    return _Pair(module, name, master, copy, add)


def _values_like(master: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return the memory of a copy of a replica's `master`, which is the master's own if it has the
    same dtype. Replicas compute with plain tensors, or with DTensors of tp.
    """
    values = local_tensor(master)
    if dtype != values.dtype:
        values = torch.empty_like(values, dtype=dtype)
    return without_replicas(master, values) if isinstance(master, DTensor) else values


def _take_gradient(add: Callable[[Tensor], None], copy: Tensor) -> None:
    grad = copy.grad
    copy.grad = None
    assert grad is not None, "the hook must be called after the gradient is set"
    add(grad)


def _add_gradient(master: Tensor, grad: Tensor) -> None:
    if master.grad is None:
        master.grad = grad.to(master.dtype)
    else:
        local_tensor(master.grad).add_(local_tensor(grad))
