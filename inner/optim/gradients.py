"""Operations on all gradients of an island: norm, scaling, and the sum of a tied table's two gradients."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from inner.model.transformer import Transformer
from inner.params import local_tensor

TIED = "embed.weight"


def sum_tied(stages: Sequence[Transformer], ends: dist.ProcessGroup | None) -> None:
    """Set both gradients of a tied table, in the first and the last pipeline stage, to their sum.

    `ends` is the group of the two ranks that hold the copies, which must both call it; None if there is one copy or
    this rank holds both.
    """
    if len(stages) == 1 and ends is None:
        return
    tables = [model.embed.weight for model in stages if model.embed is not None]
    grads = [local_tensor(table.grad) for table in tables if table.grad is not None]
    if len(grads) == 2:
        grads[0] += grads[1]
        grads[1].copy_(grads[0])
    elif ends is not None:
        dist.all_reduce(grads[0], group=ends)


def sum_over_tensor_ranks(stages: Sequence[Transformer], group: dist.ProcessGroup, *, splits_stream: bool) -> None:
    """Sum the gradients of weights that every rank of `tp` holds and uses for its own positions or
    heads.

    It is called once per step, and sums all of them together in fp32. Every rank of the group must
    call it.
    """
    named = [(name, param) for model in stages for name, param in model.named_parameters()]
    grads = [
        local_tensor(param.grad)
        for name, param in named
        # Without sequence parallelism, all ranks apply norms to the whole stream and already have
        # the norms' whole gradients.
        if param.grad is not None and _is_on_all_tensor_ranks(param) and (splits_stream or ".attention." in name)
    ]
    if grads:
        total = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(total, group=group)
        for grad, values in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(values.view_as(grad))


def _is_on_all_tensor_ranks(param: Tensor) -> bool:
    """Return whether a parameter of a tensor-parallel model is replicated over tp, the last axis of
    its mesh."""
    assert isinstance(param, DTensor), "tensor parallelism makes DTensors of all parameters"
    return isinstance(param.placements[-1], Replicate)


def squared_norm(stages: Sequence[Transformer]) -> Tensor:
    """Return this rank's contribution to the squared 2-norm of the model's gradient, 0-dim fp32.

    The sum over all ranks is the squared norm: only one replica and one copy of a tied table
    contribute.
    """
    grads = list(_counted_gradients(stages))
    if not grads:
        return torch.zeros((), device=next(stages[0].parameters()).device)
    return torch.stack(torch._foreach_norm(grads)).square().sum()


def scale_gradients(stages: Sequence[Transformer], factor: float) -> None:
    """Multiply every gradient on this rank in place."""
    grads = [local_tensor(param.grad) for model in stages for param in model.parameters() if param.grad is not None]
    torch._foreach_mul_(grads, factor)


def _counted_gradients(stages: Sequence[Transformer]) -> Iterator[Tensor]:
    for model in stages:
        is_copy = model.stage.is_last and not model.stage.is_first
        for name, param in model.named_parameters():
            # Some pipeline schedules drop gradients silently.
            assert param.grad is not None, f"{name} has no gradient"
            if not (is_copy and name == TIED) and _is_first_replica(param.grad):
                yield local_tensor(param.grad)


def _is_first_replica(grad: Tensor) -> bool:
    if not isinstance(grad, DTensor):
        return True
    place = grad.device_mesh.get_coordinate()
    assert place is not None, "this rank is not in the gradient's mesh"
    return not any(isinstance(p, Replicate) and at for p, at in zip(grad.placements, place, strict=True))
