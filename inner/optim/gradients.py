"""The island's gradients as one vector: its norm, clipping, and the sum of a tied table's two gradients."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from inner.model import Transformer
from inner.params import local_tensor

TIED = "embed.weight"


def sum_tied(parts: Sequence[Transformer], ends: dist.ProcessGroup | None) -> None:
    """Gives both copies of a tied table, in the first and in the last pipeline stage, the sum of their gradients.

    `ends`: the two ranks that hold them; None when there is one copy, or both are here. Both ranks must call it.
    """
    tables = [part.embed.weight for part in parts if part.embed is not None]
    grads = [local_tensor(table.grad) for table in tables if table.grad is not None]
    if len(grads) == 2:
        grads[0] += grads[1]
        grads[1].copy_(grads[0])
    elif ends is not None:
        dist.all_reduce(grads[0], group=ends)


def squared_norm(parts: Sequence[Transformer]) -> Tensor:
    """Squared 2-norm of the gradients that this rank counts (0-dim fp32).

    Its sum over all ranks is that of the model's gradient: of replicas, and of tied copies, one counts.
    """
    grads = list(_counted(parts))
    if not grads:
        return torch.zeros((), device=next(parts[0].parameters()).device)
    return torch.stack(torch._foreach_norm(grads)).square().sum()


def scale_gradients(parts: Sequence[Transformer], factor: float) -> None:
    """Multiplies every gradient on this rank in place."""
    grads = [local_tensor(param.grad) for part in parts for param in part.parameters() if param.grad is not None]
    torch._foreach_mul_(grads, factor)


def _counted(parts: Sequence[Transformer]) -> Iterator[Tensor]:
    for part in parts:
        is_copy = part.stage.is_last and not part.stage.is_first
        for name, param in part.named_parameters():
            # Schedules have lost gradients without a word.
            assert param.grad is not None, f"{name}: its gradient did not come"
            if not (is_copy and name == TIED) and _is_first_replica(param.grad):
                yield local_tensor(param.grad)


def _is_first_replica(grad: Tensor) -> bool:
    if not isinstance(grad, DTensor):
        return True
    place = grad.device_mesh.get_coordinate()
    assert place is not None, "a gradient of another rank's mesh"
    return not any(isinstance(p, Replicate) and at for p, at in zip(grad.placements, place, strict=True))
