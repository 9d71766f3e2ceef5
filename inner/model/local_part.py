"""The part of a weight that this rank computes with."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight that is spread over ranks, or the whole weight if it is
    not. Gradients flow back.
    """
    return weight.to_local() if isinstance(weight, DTensor) else weight
