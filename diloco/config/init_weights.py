"""Compute the hash of the weights that a run starts from if model.init_from is set. Does not import
torch.
"""

from diloco.config.schema import Config, IslandConfig, RunConfig
from diloco.errors import ConfigError
from inner.errors import InputError
from inner.huggingface.files import weights_sha256


def pin_weights_hash(config: Config) -> Config:
    """Return the config with the hash of the weights from which `config.island` starts, if any.
    Raises ConfigError.
    """
    run = add_weights_hash(config.run, config.for_island(config.island.index))
    return config.model_copy(update={"model": run.model})


def add_weights_hash(run: RunConfig, island: IslandConfig) -> RunConfig:
    """Return the run with the hash of the weights from which the island starts, if there are any.

    The hash is part of the run's config, so islands with different weights have different configs.
    Raises ConfigError if the weights are missing or do not match a given model.init_sha256.
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
            f"{folder}: the weights have the SHA-256 {sha256}, the run begins with "
            f"{run.model.init_sha256} (model.init_sha256); use the same files on every island"
        )
    return run.model_copy(update={"model": run.model.model_copy(update={"init_sha256": sha256})})
