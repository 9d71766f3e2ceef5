"""`diloco.data`: the text of the run's config for your own loop. Only one island reads each unit of
the text.

islands = diloco.Islands("run.yaml", model, optimizer)     # run.yaml has `data` and
                                                           `optimizer.tokens_per_step`
for batch in diloco.data(islands):
    loss = cross_entropy(model(batch.inputs), batch.targets)
    ...
    islands.step(tokens=batch.num_tokens, loss=loss)
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.config.schema import at_stage
from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.own_data import OwnData
from inner.data.batches import heldout_windows
from inner.data.micro_batch import decode

HELDOUT_TOKENS = 65536


class Sequences(NamedTuple):
    """Some sequences of text, on the CPU."""

    inputs: Tensor
    """The model's input, int64 [sequences, seq_len]."""
    targets: Tensor
    """The token after each input token, int64 [sequences, seq_len]; -100 where nothing is
    learned."""

    @property
    def num_tokens(self) -> int:
        """Number of targets to learn."""
        return int((self.targets >= 0).sum())


class LeasedData:
    """The text of a run as one island reads it. Iterate over it only once, and call `Islands.step`
    after each batch.
    """

    def __init__(self, islands: Islands, text: OwnData, share: tuple[int, int]) -> None:
        """Create the data. `share`: (index, number) of the equal share of each unit that this rank
        reads.
        """
        self._islands = islands
        self._text = text
        self._share = share

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the tokenizer's vocabulary."""
        return self._text.corpus.vocab_size

    def __iter__(self) -> Iterator[Sequences]:
        """Yield this rank's share of each unit that the island may train on, until the run is over.

        No unit is given to two islands, but the units of a lost island are given to other islands.
        Stages of the run change the number of sequences in a batch, and their length.
        """
        for unit in self._islands.units():
            yield cut(
                self._text.read(unit, self._islands.unit_number, self._share).micro_batches[0]
            )

    def heldout(self, num_tokens: int = HELDOUT_TOKENS, batch_size: int = 8) -> Iterator[Sequences]:
        """Yield text that is never trained on: this rank's share of about `num_tokens`, the same on
        every island.

        All ranks get the same number of batches of `batch_size` sequences. The last batches are
        filled up with sequences without a target to learn.
        """
        seq_len = self._text.config.data.seq_len
        for window in heldout_windows(
            self._text.corpus, seq_len, num_tokens, *self._share, micro_batch=batch_size
        ):
            yield cut(window)


def data(islands: Islands, *, rank: int | None = None, num_ranks: int | None = None) -> LeasedData:
    """Return the text of `data` in the config of `islands`, which has been read and tokenised
    already.

    Each rank of the island reads its share of every unit. If several ranks compute on the same text
    (tensor or context parallel), give the index of the share as `rank` and the number of shares as
    `num_ranks`. Raises ConfigError.
    """
    text = islands.use_data()
    here = islands.place if rank is None or num_ranks is None else (rank, num_ranks)
    if (rank is None) != (num_ranks is None) or not 0 <= here[0] < here[1]:
        raise ConfigError(
            f"diloco.data: got rank {rank} and num_ranks {num_ranks}; give both, with 0 <= rank < "
            "num_ranks"
        )
    run = islands.config.run
    for config in (at_stage(run, number) for number in range(len(run.stages) or 1)):
        sequences = config.optimizer.tokens_per_step // config.data.seq_len
        if sequences % here[1]:
            raise ConfigError(
                f"diloco.data: a unit has {sequences} sequences (optimizer.tokens_per_step / "
                "data.seq_len), which do "
                f"not divide into {here[1]} equal shares; make tokens_per_step a multiple of "
                f"{config.data.seq_len * here[1]}"
            )
    return LeasedData(islands, text, here)


def cut(window_BT: Tensor) -> Sequences:
    """Return the inputs and targets of windows of seq_len + 1 tokens."""
    inputs_BT, targets_BT = decode(window_BT)
    # The value that fills up held-out batches is not a token, but a model must be able to look it
    # up in its table.
    return Sequences(torch.clamp(inputs_BT[:, :-1], min=0), targets_BT[:, 1:].contiguous())
