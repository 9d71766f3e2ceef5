"""The text that an island reads: its config and the tokenised corpus. Importing this does not import torch."""

from pathlib import Path

from diloco.config.schema import IslandConfig, RunConfig
from diloco.errors import ConfigError
from inner.config import DataConfig
from inner.data.corpus import Corpus, prepare_corpus


def data_of(run: RunConfig, island: IslandConfig) -> DataConfig:
    """The run's data config, with the paths that this island sets for itself. Raises ConfigError."""
    if island.data_paths is None:
        return run.data
    if run.data.mixture:
        raise ConfigError(
            "island.data_paths replaces data.paths, and the run has a data.mixture instead; keep its files in the same "
            "places on all islands, or name them relative to the folder that the island is started in"
        )
    return run.data.model_copy(update={"paths": list(island.data_paths)})


def load_corpus(config: RunConfig, island: IslandConfig) -> Corpus:
    """Load the island's text from its cache, or tokenise it now."""
    return prepare_corpus(data_of(config, island), Path(island.cache_dir).expanduser())
