"""The hash of the weights that a run begins with, when model.init_from names a folder. No torch here."""

from diloco.config import Config, ConfigError, IslandConfig, RunConfig
from inner.errors import InputError
from inner.huggingface.files import weights_sha256


def pinned(config: Config) -> Config:
    """The config with the hash of the weights that its island begins with, if it reads any. Raises ConfigError."""
    run = with_hash(config.run, config.for_island(config.island.index))
    return config.model_copy(update={"model": run.model})


def with_hash(run: RunConfig, island: IslandConfig) -> RunConfig:
    """The run with the hash of the weights that the island begins with: islands with others have another config.

    Raises ConfigError if there are none, or model.init_sha256 is set and is another.
    """
    folder = run.initial_weights(island)
    if folder is None:
        return run
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
