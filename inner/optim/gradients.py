"""Sums of the gradients that several ranks or pipeline stages have computed for one weight."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from inner.model.transformer import Transformer
from inner.params import local_tensor


def sum_tied(model_parts: Sequence[Transformer], ends: dist.ProcessGroup | None) -> None:
    """Set both gradients of a tied table, in the first and the last pipeline stage, to their sum.

    `ends` is the group of the two ranks that hold the copies, which must both call it; None if
    there is one copy or this rank holds both.
    """
    if len(model_parts) == 1 and ends is None:
        return
    tables = [model.embed.weight for model in model_parts if model.embed is not None]
    grads = [local_tensor(table.grad) for table in tables if table.grad is not None]
    if len(grads) == 2:
        grads[0] += grads[1]
        grads[1].copy_(grads[0])
    elif ends is not None:
        dist.all_reduce(grads[0], group=ends)


def sum_over_tensor_ranks(
    model_parts: Sequence[Transformer], group: dist.ProcessGroup, *, splits_stream: bool
) -> None:
    """Sum the gradients of weights that every rank of `tp` holds and uses for its own positions or
    heads.

    It is called once per step, and sums all of them together in fp32. Every rank of the group must
    call it.
    """
    named = [(name, param) for model in model_parts for name, param in model.named_parameters()]
    grads = [
        local_tensor(param.grad)
        for name, param in named
        if param.grad is not None
        and _is_on_all_tensor_ranks(param)
        and (splits_stream or _is_shared_out(name))
    ]
    if grads:
        total = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(total, group=group)
        for grad, values in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(values.view_as(grad))


def _is_shared_out(name: str) -> bool:
    """Return whether ranks use a weight for different heads or positions also without sequence
    parallelism.

    All ranks then apply norms to the whole stream, and add biases to it, and already have their
    whole gradients.
    """
    return (".attention." in name and not name.endswith("out_proj.bias")) or ".router." in name


def _is_on_all_tensor_ranks(param: Tensor) -> bool:
    """Return whether a parameter of a tensor-parallel model is replicated over tp, the last axis of
    its mesh. The mesh of experts has no such axis.
    """
    assert isinstance(param, DTensor), (
        "tensor and expert parallelism make DTensors of all parameters"
    )
    axes = param.device_mesh.mesh_dim_names
    return axes is not None and axes[-1] == "tp" and isinstance(param.placements[-1], Replicate)
