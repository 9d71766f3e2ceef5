"""The config of a run whose training loop is not ours: which keys it may set, and what its hash says of the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diloco.config.schema import Config, IslandConfig, RunConfig, load_config, parse_config
from diloco.errors import ConfigError

SECTIONS = {"name", "seed", "outer", "optimizer", "island", "islands"}
OPTIMIZER_KEYS = {"tokens_per_step"}
ISLAND_KEYS = {
    *("name", "index", "ranks", "joins", "run_dir", "max_hours", "faults", "tensorboard", "wandb"),
    *("bootstrap", "connect_seconds", "run_key_file", "allow", "relay", "relays", "proxy", "tls_streams"),
    *("listen_host", "listen_port", "dht_port", "announce_host", "link_mbit", "gloo_in_public"),
}
UNBOUNDED = 1 << 40
"""Tokens of an inner step where optimizer.tokens_per_step does not bound them."""


@dataclass(frozen=True)
class OwnLoopConfig:
    """The config of one island of such a run."""

    run: RunConfig
    island: IslandConfig
    tokens_per_step: int | None
    """The most tokens of one inner step of an island; None: unbounded."""

    def with_model(self, params: str, num_ranks: int) -> "OwnLoopConfig":
        """The config with what identifies the model's parameters, and with the number of the island's ranks."""
        ranks = self.island.ranks
        if ranks not in (1, num_ranks):
            raise ConfigError(
                f"island.ranks is {ranks}, and torch.distributed has {num_ranks} ranks, which are all of one island; "
                "leave island.ranks out"
            )
        run = self.run.model_copy(update={"params": params})
        return OwnLoopConfig(run, self.island.model_copy(update={"ranks": num_ranks}), self.tokens_per_step)


def read_config(config: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> OwnLoopConfig:
    """Read a YAML file or the same as a dict, apply `section.key=value` overrides. Raises ConfigError."""
    if isinstance(config, Mapping):
        where, parsed = "the config", parse_config(yaml.safe_dump(dict(config)), overrides, where="the config")
    else:
        where, parsed = str(config), load_config(config, overrides)
    check_sections(parsed, where)
    run, optimizer = parsed.run, parsed.run.optimizer
    tokens = optimizer.tokens_per_step if "tokens_per_step" in parsed.optimizer.model_fields_set else None
    bounded = optimizer.model_copy(update={"tokens_per_step": tokens or UNBOUNDED})
    return OwnLoopConfig(run.model_copy(update={"optimizer": bounded}), parsed.for_island(parsed.island.index), tokens)


def check_sections(config: Config, where: str) -> None:
    """Raise ConfigError if the config sets what only `diloco train` follows, or waits for a quorum only."""
    index = config.island.index
    own = config.islands[index] if index < len(config.islands) else {}
    useless = sorted(config.model_fields_set - SECTIONS)
    useless += [f"optimizer.{key}" for key in sorted(config.optimizer.model_fields_set - OPTIMIZER_KEYS)]
    useless += [f"island.{key}" for key in sorted((config.island.model_fields_set | own.keys()) - ISLAND_KEYS)]
    if useless:
        raise ConfigError(
            f"{where} sets {', '.join(useless)}, which `diloco train` follows and a loop of your own does not: your "
            f"loop chooses model, optimizer, data, devices and checkpoints. Take that out; allowed: name, seed, outer, "
            f"optimizer.tokens_per_step, and of an island {', '.join(sorted(ISLAND_KEYS))}"
        )
    if config.outer.wait_for == "quorum":
        raise ConfigError(
            f"{where}: outer.wait_for is 'quorum', which a loop of your own does not do; set it to 'all', or train "
            "with `diloco train`"
        )
