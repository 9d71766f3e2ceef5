"""The order of a sequence's positions over ranks that gives each as many causal scores to compute.

Of 2w chunks rank r holds chunks r and 2w - 1 - r, here of 8 positions over 2 ranks:

    rank 0    0 1 . . . . 6 7    1 + 2 + 7 + 8 = 18 scores
    rank 1    . . 2 3 4 5 . .    3 + 4 + 5 + 6 = 18
"""

import torch
from torch import Tensor


def spread(sequence: Tensor, num_ranks: int, dim: int) -> Tensor:
    """(..., S, ...) to (..., num_ranks, S / num_ranks, ...): each rank's positions, rising. 2 num_ranks divide S."""
    first, second = sequence.unflatten(dim, (2 * num_ranks, -1)).chunk(2, dim)
    return torch.cat((first, second.flip(dim)), dim + 1)


def join(spread_out: Tensor, dim: int) -> Tensor:
    """The sequence of which `spread` made this, with its ranks at `dim`."""
    first, second = spread_out.chunk(2, dim + 1)
    return torch.cat((first, second.flip(dim)), dim).flatten(dim, dim + 1)
