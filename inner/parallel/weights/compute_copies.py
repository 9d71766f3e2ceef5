"""Mixed precision on a mesh of one rank, where FSDP would copy weights and gradients for
communication that is not needed.

The model's parameters are the fp32 masters. During computation, copies in the compute dtype replace
them. The gradient of each copy is added to its master's gradient in fp32 as soon as it is complete.
"""

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from inner.params import local_tensor


class _Pair(NamedTuple):
    """A parameter of a module and its copy."""

    module: nn.Module
    name: str
    master: nn.Parameter
    copy: nn.Parameter


class ComputeCopies:
    """Inside `with copies:` the stages compute in `dtype`; outside they have their fp32 masters.

    Build it after the parameters have memory. The memory of the copies does not change, because
    compiled code refers to it.
    """

    def __init__(self, stages: Sequence[nn.Module], dtype: torch.dtype) -> None:
        """Create the copies. None are needed if the masters have that dtype, for modules that
        compute in fp32, or for stages under FSDP, which casts by itself.
        """
        self._pairs = [
            _pair(module, name, param, dtype)
            for stage in stages
            if not isinstance(stage, FSDPModule)
            for module in stage.modules()
            if not getattr(module, "keeps_fp32", False)
            for name, param in module.named_parameters(recurse=False)
            if param.dtype != dtype
        ]
        self._masters = [local_tensor(pair.master) for pair in self._pairs]
        self._copies = [local_tensor(pair.copy) for pair in self._pairs]

    def __enter__(self) -> None:
        if self._pairs:
            torch._foreach_copy_(self._copies, self._masters)
        for pair in self._pairs:
            pair.module.register_parameter(pair.name, pair.copy)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pair in self._pairs:
            pair.module.register_parameter(pair.name, pair.master)

    def add_gradients(self) -> None:
        """Add gradients that no hook has added to their masters' gradients. A split backward calls
        no hooks.
        """
        for pair in self._pairs:
            if pair.copy.grad is not None:
                _add_gradient(pair.master, pair.copy)


def _pair(module: nn.Module, name: str, master: nn.Parameter, dtype: torch.dtype) -> _Pair:
    copy = nn.Parameter(torch.empty_like(master, dtype=dtype))
    copy.register_post_accumulate_grad_hook(partial(_add_gradient, master))
    return _Pair(module, name, master, copy)


def _add_gradient(master: Tensor, copy: Tensor) -> None:
    grad = copy.grad
    copy.grad = None
    assert grad is not None, "the hook must be called after the gradient is set"
    if master.grad is None:
        master.grad = grad.to(master.dtype)
    else:
        local_tensor(master.grad).add_(local_tensor(grad))
