"""The text that the config of the user's own loop names."""

from collections.abc import Sequence
from contextlib import ExitStack

from diloco.assemble import build_batches
from diloco.config.schema import RunConfig, at_stage
from diloco.errors import ConfigError
from diloco.own_loop.run_config import OwnLoopConfig
from diloco.runtime.corpus import load_corpus
from inner.data.batches import StepBatch
from inner.data.corpus import Corpus


class OwnData:
    """The tokenised text, and its division into units in the present stage of the run."""

    def __init__(self, run: RunConfig, corpus: Corpus) -> None:
        self._run = run
        self.corpus = corpus
        self.is_used = False
        """Whether the loop has requested the text."""
        self.stage = 0
        self.config = at_stage(run, 0)
        self.batches = build_batches(run, corpus)
        self._sources: dict[str, int] = {}

    def enter_stage(self, borders: Sequence[tuple[int, int]]) -> bool:
        """Switch to the stage behind these borders of the ledger. Return whether it is another
        stage.
        """
        number = len(borders)
        if number == self.stage:
            return False
        self.stage = number
        self.config = at_stage(self._run, number)
        self.batches = build_batches(self._run, self.corpus, borders)
        return True

    def read(self, unit: int, number: int, share: tuple[int, int]) -> StepBatch:
        """Return a share of a unit. `share`: (index, number of equal shares); `number` as in
        IslandBatches.read_step.
        """
        data = self.config.data
        optimizer = self.config.optimizer
        num_sequences = optimizer.tokens_per_step // data.seq_len // share[1]
        batch = self.batches.read_step(unit, *share, num_sequences, number)
        self._sources = batch.source_tokens
        return batch

    def take_sources(self) -> dict[str, int]:
        """Return the tokens of each source of a mixture that were read since the last call."""
        sources = self._sources
        self._sources = {}
        return sources

    def require_use(self) -> None:
        """Raise ConfigError if the loop does not train on the text that its config names."""
        if not self.is_used:
            raise ConfigError(
                "the config sets data, and the loop does not read it: take the batches from "
                "diloco.data(islands), or "
                "take data out of the config"
            )


def open_data(config: OwnLoopConfig, stack: ExitStack) -> OwnData | None:
    """Open the text before the run is entered, until the stack is closed. Return None if the config
    names no text.

    The text is tokenised completely, or, with text in shards, only the first shard. Raises
    InputError.
    """
    if not config.has_data:
        return None
    corpus = load_corpus(config.run, config.island)
    stack.callback(corpus.close)
    return OwnData(config.run, corpus)
