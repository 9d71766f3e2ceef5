"""The text that the config of a loop of one's own names."""

from diloco.assemble import build_batches
from diloco.errors import ConfigError
from diloco.own_loop.run_config import OwnLoopConfig
from diloco.runtime.corpus import load_corpus
from inner.data.batches import IslandBatches
from inner.data.corpus import Corpus


class OwnData:
    """The text, read and tokenised, and the units into which it is cut."""

    def __init__(self, corpus: Corpus, batches: IslandBatches) -> None:
        self.corpus, self.batches = corpus, batches
        self.is_used = False
        """Whether the loop has asked for it."""

    def require_use(self) -> None:
        """Raise ConfigError if the loop trains on something else than the text that its config names."""
        if not self.is_used:
            raise ConfigError(
                "the config sets data, and the loop does not read it: take the batches from diloco.data(islands), or "
                "take data out of the config"
            )


def open_data(config: OwnLoopConfig) -> OwnData | None:
    """Read and tokenise the text before the run is entered; None if the config names none. Raises InputError."""
    if not config.has_data:
        return None
    corpus = load_corpus(config.run, config.island)
    return OwnData(corpus, build_batches(config.run, corpus))
