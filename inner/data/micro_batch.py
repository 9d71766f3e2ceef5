"""Model inputs cut from a window of tokens: input tokens, targets, and the documents that they
belong to.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inner.data.chat.coding import CONTEXT, IGNORE

IGNORE_INDEX = IGNORE
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Packing:
    """How documents are packed into the sequences of a micro-batch. It is known on the host, so no
    layer waits for the device.

    Two sequences of 6 tokens `a a b b b b` and `c d d d d d` have the bounds 0 2 6 7 12, and the
    longest document has 5.
    """

    sequences_BT: np.ndarray
    """Document number at each position of the whole sequences, int64; it never decreases along a
    sequence."""
    documents_BS: np.ndarray
    """Document number at each position from which this rank attends."""
    bounds_N: Tensor
    """Where the documents of `documents_BS` begin in the flattened micro-batch, and its length;
    int32 (cu_seqlens), on the device."""
    host_bounds_N: Tensor
    """A copy of `bounds_N` on the CPU."""
    longest: int
    """Number of positions of the longest document (max_seqlen)."""

    @cached_property
    def starts_BT(self) -> Tensor:
        """Where the document of each position of the whole sequences begins; int64 on the CPU."""
        is_first_BT = np.diff(self.sequences_BT, axis=1, prepend=-1) != 0
        begins_BT = np.where(is_first_BT, np.arange(self.sequences_BT.shape[1]), 0)
        return torch.from_numpy(np.maximum.accumulate(begins_BT, axis=1))


def build_packing(
    sequences_BT: np.ndarray, positions_S: np.ndarray, device: torch.device
) -> Packing:
    """Build the packing at some rising positions of sequences whose document numbers are
    `sequences_BT`.
    """
    documents_BS = sequences_BT[:, positions_S]
    is_first_BS = np.ones(documents_BS.shape, dtype=bool)
    is_first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    bounds_N = np.append(np.flatnonzero(is_first_BS), documents_BS.size)
    host_bounds_N = torch.from_numpy(bounds_N.astype(np.int32))
    return Packing(
        sequences_BT,
        documents_BS,
        send(host_bounds_N, device),
        host_bounds_N,
        longest=int(np.diff(bounds_N).max()),
    )


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without making the host wait.

    CUDA copies from pageable memory only after all earlier work of the device, and the host waits
    for that. The tensor is therefore copied through pinned memory.
    """
    return (
        values.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else values.to(device)
    )


@dataclass(frozen=True)
class Ahead:
    """What the extra depths of multi-token prediction read and learn at this rank's positions. Each
    tensor is (P, B, S) int64 for P depths; -100 where a depth has no token or no target.
    """

    tokens_PBS: Tensor
    """At depth d, from 1, the token d positions ahead."""
    targets_PBS: Tensor
    """At depth d the target d positions ahead."""


class MicroBatch(NamedTuple):
    """Input of one forward pass: this rank's positions of some sequences. Each tensor is (B, S)
    int64.
    """

    tokens_BS: Tensor
    targets_BS: Tensor
    packing: Packing | None
    ahead: Ahead | None = None
    """What extra depths predict; None: the model has none, or they are not computed."""
    dropout: Any = None
    """The masks of dropout, an `inner.model.dropout.Dropout`; None: no dropout."""


@dataclass(frozen=True)
class Cutter:
    """Cuts windows into micro-batches with the positions that this rank holds, and copies them to
    its device.
    """

    positions_S: Tensor
    """The positions of a sequence that this rank holds, int64, on the CPU."""
    seq_len: int
    eos_id: int | None
    """Token that ends a document; None if attention ignores document boundaries."""
    device: torch.device = CPU
    attends_everywhere: bool = False
    """Whether this rank's attention has queries at all positions, although the rank holds only some
    of them."""
    num_depths: int = 0
    """Number of extra depths of multi-token prediction."""

    def __call__(self, window_BT: Tensor) -> MicroBatch:
        """Cut a CPU window of seq_len + 1 tokens. It may be shorter if this rank holds all
        positions.
        """
        tokens_BT, targets_BT = decode(window_BT)
        here_2BS = torch.stack((tokens_BT[:, :-1], targets_BT[:, 1:]))
        if not self.holds_all:
            length = here_2BS.shape[2]
            assert length == self.seq_len, f"{length} positions, the mesh has {self.seq_len}"
            here_2BS = here_2BS[..., self.positions_S]
        tokens_BS, targets_BS = send(here_2BS, self.device)
        packing = None if self.eos_id is None else self.pack(tokens_BT[:, :-1])
        ahead = self._look_ahead(tokens_BT, targets_BT, packing) if self.num_depths else None
        return MicroBatch(tokens_BS, targets_BS, packing, ahead)

    def _look_ahead(self, tokens_BT: Tensor, targets_BT: Tensor, packing: Packing | None) -> Ahead:
        """Return what the extra depths read and learn. Whole sequences are shifted, so that a rank
        also sees tokens of positions that another rank holds.
        """
        documents_BS = None if packing is None else torch.from_numpy(packing.sequences_BT)
        depths = range(1, self.num_depths + 1)
        shifted_P2BS = torch.stack(
            [shift(tokens_BT, targets_BT, documents_BS, depth) for depth in depths]
        )
        if not self.holds_all:
            shifted_P2BS = shifted_P2BS[..., self.positions_S]
        here_P2BS = send(shifted_P2BS, self.device)
        return Ahead(here_P2BS[:, 0], here_P2BS[:, 1])

    @property
    def holds_all(self) -> bool:
        """Whether this rank holds all positions of a sequence."""
        return len(self.positions_S) == self.seq_len

    def pack(self, tokens_BT: Tensor) -> Packing:
        """Return the packing of the documents in whole sequences. Each document ends with eos."""
        is_end_BT = tokens_BT.numpy() == self.eos_id
        sequences_BT = is_end_BT.cumsum(axis=1) - is_end_BT
        everywhere = self.holds_all or self.attends_everywhere
        positions_S = np.arange(tokens_BT.shape[1]) if everywhere else self.positions_S.numpy()
        return build_packing(sequences_BT, positions_S, self.device)


def decode(window_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids that the model reads, and the ids that it learns, with -100 for neither
    (inner/data/chat/coding.py).
    """
    if not bool((window_BT < IGNORE_INDEX).any()):
        return window_BT, window_BT
    is_context_BT = window_BT < IGNORE_INDEX
    return torch.where(is_context_BT, CONTEXT - window_BT, window_BT), window_BT.masked_fill(
        is_context_BT, IGNORE_INDEX
    )


def shift(tokens_BT: Tensor, targets_BT: Tensor, documents_BS: Tensor | None, depth: int) -> Tensor:
    """Return the tokens and the targets `depth` positions ahead of each position but the last, (2,
    B, S).

    Both are -100 where the sequence ends before the target, and where the token is in another
    document. `documents_BS`: see Packing.sequences_BT.
    """
    here_2BS = torch.stack((tokens_BT[:, depth:-1], targets_BT[:, depth + 1 :]))
    if documents_BS is not None:
        is_other_BS = documents_BS[:, depth:] != documents_BS[:, : documents_BS.shape[1] - depth]
        here_2BS = here_2BS.masked_fill(is_other_BS, IGNORE_INDEX)
    return F.pad(here_2BS, (0, depth), value=IGNORE_INDEX)


def num_targets(window_BT: Tensor) -> int:
    """Return the number of valid targets in a window."""
    return int((window_BT[:, 1:] >= 0).sum())


def num_inputs_in(window_BT: Tensor) -> int:
    """Return the number of positions of a window that the model reads, and that are not padding."""
    return int((decode(window_BT)[0][:, :-1] >= 0).sum())


def empty_window(num_sequences: int, seq_len: int) -> Tensor:
    """Return a window without a valid target."""
    return torch.full((num_sequences, seq_len + 1), IGNORE_INDEX)
