"""The norm of the model's gradient, and clipping by it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from inner.model.transformer import Transformer
from inner.params import local_tensor

TIED = "embed.weight"


def squared_norm(model_parts: Sequence[Transformer]) -> Tensor:
    """Return this rank's contribution to the squared 2-norm of the model's gradient, 0-dim fp32.

    The sum over all ranks is the squared norm: only one replica and one copy of a tied table
    contribute.
    """
    grads = list(_counted_gradients(model_parts))
    if not grads:
        return torch.zeros((), device=next(model_parts[0].parameters()).device)
    return torch.stack(torch._foreach_norm(grads)).square().sum()


def clip_gradients(model_parts: Sequence[Transformer], norm: float, longest: float | None) -> None:
    """Scale every gradient on this rank so that the model's gradient is at most `longest` long.

    `norm`: the norm of the model's gradient over the whole mesh. `longest` None: clip nothing.
    """
    if longest is not None and norm > longest:
        multiply_gradients(model_parts, longest / norm)


def multiply_gradients(model_parts: Sequence[Transformer], factor: float) -> None:
    """Multiply every gradient on this rank, fp32, by `factor` in place."""
    grads = [
        local_tensor(param.grad)
        for model in model_parts
        for param in model.parameters()
        if param.grad is not None
    ]
    torch._foreach_mul_(grads, factor)


def _counted_gradients(model_parts: Sequence[Transformer]) -> Iterator[Tensor]:
    for model in model_parts:
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
    return not any(
        isinstance(p, Replicate) and at for p, at in zip(grad.placements, place, strict=True)
    )
