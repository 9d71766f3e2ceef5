"""Which sequences a unit of text has: a pure function of the seed, with nothing to save or restore."""

from collections.abc import Iterator

import numpy as np
import torch

from inner.data.corpus import Corpus, Text
from inner.data.mixture import MixedOrder, Shares
from inner.data.shards import Tokens
from inner.errors import InputError

PADDING = -100
"""Stands for no token: a target that torch's cross-entropy leaves out."""


class SequenceOrder:
    """The infinite order in which `num_sequences` sequences are read: each epoch once all of them, shuffled anew."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        self.num_sequences = num_sequences
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def __getitem__(self, position: int) -> int:
        """The sequence at `position` >= 0; positions run on over the epochs."""
        epoch, index = divmod(position, self.num_sequences)
        if epoch != self._epoch:
            self._permutation = self._shuffled(epoch)
            self._epoch = epoch
        return int(self._permutation[index])

    def _shuffled(self, epoch: int) -> np.ndarray:
        # RandomState, because numpy has frozen its streams: islands with other numpy versions read the same order.
        seeds = [self._seed & 0xFFFFFFFF, self._seed >> 32 & 0xFFFFFFFF, epoch]
        return np.random.RandomState(seeds).permutation(self.num_sequences)


class IslandBatches:
    """The training text, cut into units: what an island reads in one inner step.

    Unit u has the positions [u, u + 1) x sequences_per_step of the order. As long as n islands make their steps
    together, island i reads unit s*n + i in step s:
        step    island 0    island 1    island 2
           0    unit 0      unit 1      unit 2
           1    unit 3      unit 4      unit 5
    One island with n times the sequences_per_step so reads the same sequences in every step.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        seed: int,
        num_islands: int,
        sequences_per_step: int,
    ) -> None:
        self._texts = corpus.texts
        self._seq_len = seq_len
        self._num_sequences = [_num_windows(text, text.train, seq_len, "training") for text in corpus.texts]
        orders = [SequenceOrder(number, seed) for number in self._num_sequences]
        self._order = MixedOrder(corpus.weights, orders, seed)
        self._num_islands = num_islands
        self._sequences_per_step = sequences_per_step
        self._require_one_step()

    def micro_batches(self, unit: int, data_rank: int, num_data_ranks: int, micro_batch: int) -> list[torch.Tensor]:
        """This rank's micro-batches of a unit (from 0), each int64 [micro_batch, seq_len + 1] on the CPU."""
        per_rank = self._sequences_per_step // num_data_ranks
        if per_rank * num_data_ranks != self._sequences_per_step or per_rank % micro_batch:
            raise InputError(
                f"{self._sequences_per_step} sequences a step do not divide into {num_data_ranks} data ranks with "
                f"micro-batches of {micro_batch}; make tokens_per_step a multiple of "
                f"{self._seq_len * num_data_ranks * micro_batch} (seq_len x data ranks x micro-batch)"
            )
        first = unit * self._sequences_per_step + data_rank * per_rank
        starts = range(first, first + per_rank, micro_batch)
        return [self._read(range(start, start + micro_batch)) for start in starts]

    @property
    def is_mixed(self) -> bool:
        return len(self._texts) > 1

    def tokens_by_source(self, unit: int) -> dict[str, int]:
        """How many tokens of each text are in the unit."""
        first = unit * self._sequences_per_step
        before, after = self._order.counts(first), self._order.counts(first + self._sequences_per_step)
        numbers = [(new - old) * self._seq_len for old, new in zip(before, after, strict=True)]
        return {text.name: number for text, number in zip(self._texts, numbers, strict=True)}

    def _read(self, positions: range) -> torch.Tensor:
        places = [self._order[position] for position in positions]
        return torch.stack([_window(self._texts[p.source].train, p.sequence, self._seq_len) for p in places])

    def _require_one_step(self) -> None:
        read = self._num_islands * self._sequences_per_step
        weights = [text.weight for text in self._texts]
        for text, number, needed in zip(self._texts, self._num_sequences, Shares(weights).counts(read), strict=True):
            if number < needed:
                raise InputError(
                    f"the training text{_of(text)} has {number} sequences of {self._seq_len} tokens, but one step "
                    f"reads {needed} ({self._num_islands} islands x {self._sequences_per_step}); give more text, "
                    "raise data.max_tokens, or lower tokens_per_step or seq_len"
                )


def heldout_windows(
    corpus: Corpus,
    seq_len: int,
    num_tokens: int,
    data_rank: int,
    num_data_ranks: int,
    micro_batch: int,
) -> Iterator[torch.Tensor]:
    """This rank's held-out windows, int64 [micro_batch, seq_len + 1] on the CPU, padded with -100 rows.

    All ranks together read the first num_tokens targets (rounded up to windows, as far as there are), whatever
    the mesh; every rank yields equally often, because a sharded forward pass needs all ranks. Texts have the shares
    that they have in training.
    """
    shares = Shares(corpus.weights)
    available = shares.most([_num_windows(text, text.heldout, seq_len, "held-out") for text in corpus.texts])
    num_windows = min(available, -(-num_tokens // seq_len))
    num_micro_batches = -(-num_windows // (num_data_ranks * micro_batch))
    first = data_rank * num_micro_batches * micro_batch
    for start in range(first, first + num_micro_batches * micro_batch, micro_batch):
        batch = torch.full((micro_batch, seq_len + 1), PADDING, dtype=torch.int64)
        for row, index in enumerate(range(start, min(start + micro_batch, num_windows))):
            place = shares.place(index)
            batch[row] = _window(corpus.texts[place.source].heldout, place.sequence, seq_len)
        yield batch


def _window(tokens: Tokens, index: int, seq_len: int) -> torch.Tensor:
    # One token more than the stride: every token but the first is a target exactly once.
    return torch.from_numpy(tokens[index * seq_len : (index + 1) * seq_len + 1].astype(np.int64))


def _num_windows(text: Text, tokens: Tokens, seq_len: int, split: str) -> int:
    num_windows = (len(tokens) - 1) // seq_len
    if num_windows < 1:
        raise InputError(
            f"the {split} text{_of(text)} has {len(tokens)} tokens, but one window needs {seq_len + 1} "
            "(data.seq_len + 1); give more text, raise data.max_tokens or data.heldout_fraction, or lower data.seq_len"
        )
    return num_windows


def _of(text: Text) -> str:
    """Which text, in a mixture."""
    return f" of {text.name!r}" if text.name else ""
