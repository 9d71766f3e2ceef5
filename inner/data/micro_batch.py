"""Model inputs cut from a window of tokens: input tokens, targets, and where documents lie among them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inner.data.chat.coding import CONTEXT, IGNORE

IGNORE_INDEX = IGNORE
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Packing:
    """How documents are packed into the sequences of a micro-batch. The host knows it, so no layer asks the device.

    Two sequences of 6 tokens `a a b b b b` and `c d d d d d` have the bounds 0 2 6 7 12, and the longest document 5.
    """

    sequences_BT: np.ndarray
    """Number of the document of each position of the whole sequences, int64; it never decreases along a sequence."""
    documents_BS: np.ndarray
    """The same at the positions that this rank attends from."""
    bounds_N: Tensor
    """Where their documents begin in the flattened micro-batch, and its length; int32 (cu_seqlens), on the device."""
    host_bounds_N: Tensor
    """The same on the CPU."""
    longest: int
    """Number of positions of the longest document (max_seqlen)."""


def build_packing(sequences_BT: np.ndarray, positions_S: np.ndarray, device: torch.device) -> Packing:
    """The packing of documents at some rising positions of sequences whose document numbers are `sequences_BT`."""
    documents_BS = sequences_BT[:, positions_S]
    is_first_BS = np.ones(documents_BS.shape, dtype=bool)
    is_first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    bounds_N = np.append(np.flatnonzero(is_first_BS), documents_BS.size)
    host_bounds_N = torch.from_numpy(bounds_N.astype(np.int32))
    return Packing(
        sequences_BT, documents_BS, send(host_bounds_N, device), host_bounds_N, longest=int(np.diff(bounds_N).max())
    )


def send(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, for which the host does not wait.

    From other memory than pinned CUDA copies after all work that the device has been given, and the host waits for it.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class MicroBatch(NamedTuple):
    """Input of one forward pass: this rank's positions of some sequences, each tensor (B, S) int64."""

    tokens_BS: Tensor
    targets_BS: Tensor
    packing: Packing | None


@dataclass(frozen=True)
class Cutter:
    """Cuts windows into micro-batches of the positions that this rank holds, and copies them to its device."""

    positions_S: Tensor
    """Positions of the sequence that this rank holds, int64, on the CPU."""
    seq_len: int
    eos_id: int | None
    """Token that ends a document; None if attention ignores document boundaries."""
    device: torch.device = CPU
    attends_everywhere: bool = False
    """Whether this rank's attention sees queries of all positions, though the rank holds only some of them."""

    def __call__(self, window_BT: Tensor) -> MicroBatch:
        """Cut a CPU window of seq_len + 1 tokens; it may be shorter if this rank holds all positions."""
        tokens_BT, targets_BT = decode(window_BT)
        here_2BS = torch.stack((tokens_BT[:, :-1], targets_BT[:, 1:]))
        if not self.holds_all:
            length = here_2BS.shape[2]
            assert length == self.seq_len, f"{length} positions, the mesh has {self.seq_len}"
            here_2BS = here_2BS[..., self.positions_S]
        tokens_BS, targets_BS = send(here_2BS, self.device)
        return MicroBatch(tokens_BS, targets_BS, None if self.eos_id is None else self.pack(tokens_BT[:, :-1]))

    @property
    def holds_all(self) -> bool:
        """Whether this rank holds all positions."""
        return len(self.positions_S) == self.seq_len

    def pack(self, tokens_BT: Tensor) -> Packing:
        """The packing of the documents of some whole sequences; each document ends with its eos."""
        is_end_BT = tokens_BT.numpy() == self.eos_id
        sequences_BT = is_end_BT.cumsum(axis=1) - is_end_BT
        everywhere = self.holds_all or self.attends_everywhere
        positions_S = np.arange(tokens_BT.shape[1]) if everywhere else self.positions_S.numpy()
        return build_packing(sequences_BT, positions_S, self.device)


def decode(window_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Which ids the model reads, and which it learns; -100 where none (inner/data/chat/coding.py)."""
    if not bool((window_BT < IGNORE_INDEX).any()):
        return window_BT, window_BT
    is_context_BT = window_BT < IGNORE_INDEX
    return torch.where(is_context_BT, CONTEXT - window_BT, window_BT), window_BT.masked_fill(
        is_context_BT, IGNORE_INDEX
    )


def num_targets(window_BT: Tensor) -> int:
    """Number of valid targets of a window."""
    return int((window_BT[:, 1:] >= 0).sum())


def empty_window(num_sequences: int, seq_len: int) -> Tensor:
    """A window without a single valid target."""
    return torch.full((num_sequences, seq_len + 1), IGNORE_INDEX)
