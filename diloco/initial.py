"""The hash of the weights that a run begins with, when model.init_from names a folder. No torch here."""

from pathlib import Path

from diloco.config import Config, ConfigError, RunConfig, initial_weights
from inner.errors import InputError
from inner.huggingface.files import weights_sha256


def pinned(config: Config) -> Config:
    """The config with the hash of its island's first weights, if it reads any. Raises ConfigError."""
    folder = initial_weights(config, config.for_island(config.island.index))
    return config if folder is None else config.model_copy(update={"model": with_hash(config.run, folder).model})


def with_hash(run: RunConfig, folder: Path) -> RunConfig:
    """The run with the hash of the weights in `folder`, so that islands with others have another config.

    Raises ConfigError if there are none, or model.init_sha256 is set and is another.
    """
    try:
        sha256 = weights_sha256(folder)
    except InputError as error:
        raise ConfigError(str(error)) from None
    if run.model.init_sha256 not in (None, sha256):
        raise ConfigError(
            f"{folder}: the weights have the SHA-256 {sha256}, the run begins with {run.model.init_sha256} "
            "(model.init_sha256); use the same files on every island"
        )
    return run.model_copy(update={"model": run.model.model_copy(update={"init_sha256": sha256})})
