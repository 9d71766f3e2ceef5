"""A window of tokens as a model sees it: inputs, targets, and which document each position belongs to."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""A target that does not count."""


class MicroBatch(NamedTuple):
    """What one forward pass reads: this rank's positions of some sequences, each tensor (B, S) int64."""

    tokens_BS: Tensor
    targets_BS: Tensor
    documents_BS: Tensor | None


@dataclass(frozen=True)
class Cutter:
    """Cuts windows into micro-batches of the positions that this rank holds."""

    positions_S: Tensor
    """Where in the sequence they lie, int64."""
    seq_len: int
    eos_id: int | None
    """The token that ends a document; None: attention does not look at documents."""

    def __call__(self, window_BT: Tensor) -> MicroBatch:
        """A window of seq_len + 1 tokens, or less when this rank holds all positions."""
        tokens_BS, targets_BS = window_BT[:, :-1], window_BT[:, 1:]
        documents_BS = None if self.eos_id is None else document_numbers(tokens_BS, self.eos_id)
        if len(self.positions_S) == self.seq_len:
            return MicroBatch(tokens_BS, targets_BS, documents_BS)
        assert tokens_BS.shape[1] == self.seq_len, (
            f"{tokens_BS.shape[1]} positions, the mesh was built for {self.seq_len}"
        )
        positions_S = self.positions_S.to(window_BT.device)
        documents_BS = None if documents_BS is None else documents_BS[:, positions_S]
        return MicroBatch(tokens_BS[:, positions_S], targets_BS[:, positions_S], documents_BS)


def document_numbers(tokens_BS: Tensor, eos_id: int) -> Tensor:
    """Number of the document that each token belongs to, from 0; its eos is a document's last token."""
    ends_BS = (tokens_BS == eos_id).long()
    return ends_BS.cumsum(dim=-1) - ends_BS


def num_targets(window_BT: Tensor) -> int:
    """Valid targets of a window."""
    return int((window_BT[:, 1:] >= 0).sum())


def empty_window(num_sequences: int, seq_len: int, device: torch.device) -> Tensor:
    """A window in which nothing counts."""
    return torch.full((num_sequences, seq_len + 1), IGNORED, device=device)
