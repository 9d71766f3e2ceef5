"""Model inputs cut from a window of tokens: input tokens, targets and the document of each position."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""The target of a position without a next token; the loss leaves it out, as torch's cross_entropy does."""


class MicroBatch(NamedTuple):
    """Input of one forward pass: this rank's positions of some sequences, each tensor (B, S) int64."""

    tokens_BS: Tensor
    targets_BS: Tensor
    documents_BS: Tensor | None


@dataclass(frozen=True)
class Cutter:
    """Cuts windows into micro-batches of the positions that this rank holds."""

    positions_S: Tensor
    """Positions of the sequence that this rank holds, int64, on the device of the windows."""
    seq_len: int
    eos_id: int | None
    """Token that ends a document; None if attention ignores document boundaries."""

    def __call__(self, window_BT: Tensor) -> MicroBatch:
        """Cut a window of seq_len + 1 tokens; it may be shorter if this rank holds all positions."""
        tokens_BS, targets_BS = window_BT[:, :-1], window_BT[:, 1:]
        documents_BS = None if self.eos_id is None else document_numbers(tokens_BS, self.eos_id)
        if len(self.positions_S) == self.seq_len:
            return MicroBatch(tokens_BS, targets_BS, documents_BS)
        assert tokens_BS.shape[1] == self.seq_len, f"{tokens_BS.shape[1]} positions, the mesh has {self.seq_len}"
        documents_BS = None if documents_BS is None else documents_BS[:, self.positions_S]
        return MicroBatch(tokens_BS[:, self.positions_S], targets_BS[:, self.positions_S], documents_BS)


def document_numbers(tokens_BS: Tensor, eos_id: int) -> Tensor:
    """Number of the document of each token, counted from 0; a document ends with its eos."""
    ends_BS = (tokens_BS == eos_id).long()
    return ends_BS.cumsum(dim=-1) - ends_BS


def num_targets(window_BT: Tensor) -> int:
    """Number of valid targets of a window."""
    return int((window_BT[:, 1:] >= 0).sum())


def empty_window(num_sequences: int, seq_len: int, device: torch.device) -> Tensor:
    """A window without a single valid target."""
    return torch.full((num_sequences, seq_len + 1), IGNORE_INDEX, device=device)
