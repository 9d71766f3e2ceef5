"""Zigzag order: spread a sequence over ranks so that all compute the same number of causal scores.

The sequence is cut into 2w chunks, and rank r holds chunks r and 2w - 1 - r. With 8 positions on 2
ranks:

    rank 0    0 1 . . . . 6 7    1 + 2 + 7 + 8 = 18 scores
    rank 1    . . 2 3 4 5 . .    3 + 4 + 5 + 6 = 18
"""

import numpy as np
import torch
from torch import Tensor


def zigzag_split(sequence: Tensor, num_ranks: int, dim: int) -> Tensor:
    """Split (..., S, ...) into (..., num_ranks, S / num_ranks, ...) with rising positions; 2
    num_ranks must divide S.
    """
    first, second = sequence.unflatten(dim, (2 * num_ranks, -1)).chunk(2, dim)
    return torch.cat((first, second.flip(dim)), dim + 1)


def zigzag_join(split: Tensor, dim: int) -> Tensor:
    """Invert `zigzag_split`. The ranks are at dimension `dim`."""
    first, second = split.chunk(2, dim + 1)
    return torch.cat((first, second.flip(dim)), dim).flatten(dim, dim + 1)


def zigzag_piece(sequence_BT: np.ndarray, num_ranks: int, rank: int) -> np.ndarray:
    """Return one rank's piece of (B, T), in the rank's own order: (B, T / num_ranks)."""
    chunks = np.split(sequence_BT, 2 * num_ranks, axis=1)
    return np.concatenate((chunks[rank], chunks[-1 - rank]), axis=1)


def zigzag_positions(num_positions: int, num_ranks: int, rank: int) -> np.ndarray:
    """Return the positions of the whole sequence that a rank with this number of positions holds,
    rising: int64.
    """
    return zigzag_piece(np.arange(num_positions * num_ranks)[None], num_ranks, rank)[0]
