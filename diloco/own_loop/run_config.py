"""The config of a run with the user's own training loop: its allowed keys, and the part of the
model in its hash.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from diloco.config.check import check_index, check_network
from diloco.config.own_code import provide_own_code
from diloco.config.schema import (
    Config,
    IslandConfig,
    RunConfig,
    load_config,
    most_tokens_per_step,
    parse_config,
)
from diloco.errors import ConfigError
from diloco.own_loop.model.island_model import ModelRules
from diloco.own_loop.saved_state import SavedState

SECTIONS = {
    "name",
    "seed",
    "order_seed",
    "data",
    "stages",
    "outer",
    "optimizer",
    "island",
    "islands",
}
OPTIMIZER_KEYS = {"tokens_per_step"}
ISLAND_KEYS = {
    *(
        "name",
        "index",
        "ranks",
        "joins",
        "run_dir",
        "max_hours",
        "faults",
        "tensorboard",
        "wandb",
        "masters",
    ),
    *(
        "bootstrap",
        "connect_seconds",
        "run_key_file",
        "allow",
        "relay",
        "relays",
        "proxy",
        "tls_streams",
    ),
    *(
        "listen_host",
        "listen_port",
        "dht_port",
        "announce_host",
        "link_mbit",
        "gloo_in_public",
        "alerts",
    ),
}
DATA_ISLAND_KEYS = {"cache_dir", "data_paths", "mixture_paths", "tokenizer", "shards"}
"""Keys of an island that say where the text of `data` is, and how it is read."""
UNBOUNDED = 1 << 40
"""Assumed tokens of an inner step if optimizer.tokens_per_step gives no limit."""


@dataclass(frozen=True)
class OwnLoopConfig:
    """The config of one island with its own loop."""

    run: RunConfig
    island: IslandConfig
    tokens_per_step: int | None
    """Most tokens of one inner step of an island; None: no limit."""
    has_data: bool = False
    """Whether the config names the text, for `diloco.data`."""

    def with_model(
        self, params: str, num_ranks: int, names: tuple[str, ...] = ()
    ) -> "OwnLoopConfig":
        """Return the config with the identifier of the model's parameters and their names, and with
        the number of the island's ranks.
        """
        ranks = self.island.ranks
        if ranks not in (1, num_ranks):
            raise ConfigError(
                f"island.ranks is {ranks}, and torch.distributed has {num_ranks} ranks, which all "
                "belong to one island; leave island.ranks out"
            )
        run = self.run.model_copy(update={"params": params, "param_names": names})
        return replace(self, run=run, island=self.island.model_copy(update={"ranks": num_ranks}))

    def model_rules(self, saved: SavedState | None, num_ranks: int) -> ModelRules:
        """Return what the config, and the saved state if there is one, say about the model."""

        def was_saved(description: str) -> bool:
            return (
                saved is not None
                and saved.run_hash == self.with_model(description, num_ranks).run.hash
            )

        averages_moments = self.run.outer.moments is not None
        return ModelRules(
            averages_moments, self.island.masters, was_saved if saved is not None else None
        )


def read_config(config: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> OwnLoopConfig:
    """Read a YAML file, or a dict with the same content, and apply `section.key=value` overrides.

    Raises ConfigError, or InputError if the network between islands needs a package that is not
    installed.
    """
    if isinstance(config, Mapping):
        where = "the config"
        parsed = parse_config(yaml.safe_dump(dict(config)), overrides, where="the config")
    elif not isinstance(config, str | Path):
        raise ConfigError(
            f"Islands: the config is a {type(config).__name__}; allowed: a YAML file's path, or a "
            "dict with the same "
            'content. The order is Islands(config, model, optimizer), as in Islands("run.yaml", '
            "model, optimizer)"
        )
    else:
        where = str(config)
        parsed = load_config(config, overrides)
    check_sections(parsed, f"{where} with its overrides" if overrides else where)
    provide_own_code(parsed.run)
    run = parsed.run
    optimizer = parsed.run.optimizer
    tokens = (
        optimizer.tokens_per_step
        if "tokens_per_step" in parsed.optimizer.model_fields_set
        else None
    )
    bounded = optimizer.model_copy(update={"tokens_per_step": tokens or UNBOUNDED})
    has_data = "data" in parsed.model_fields_set
    if tokens is None and (has_data or run.outer.wait_for == "quorum"):
        what = "data" if has_data else "outer.wait_for: quorum"
        raise ConfigError(
            f"{where}: {what} needs optimizer.tokens_per_step, from which the units of data and "
            "the length of the run follow; set it to the tokens of one step of an island"
        )
    if has_data and tokens is not None and not run.stages and tokens % run.data.seq_len:
        raise ConfigError(
            f"{where}: optimizer.tokens_per_step is {tokens}, which is not a multiple of "
            f"data.seq_len ({run.data.seq_len}): a unit of data is whole sequences"
        )
    check_index(parsed, parsed.island.index)
    check_network(run, parsed.for_island(parsed.island.index))
    run = run.model_copy(update={"optimizer": bounded})
    most = None if tokens is None else most_tokens_per_step(run)
    return OwnLoopConfig(run, parsed.for_island(parsed.island.index), most, has_data)


def check_sections(config: Config, where: str) -> None:
    """Raise ConfigError if the config has settings that only `diloco train` follows."""
    index = config.island.index
    own = config.islands[index] if index < len(config.islands) else {}
    allowed = ISLAND_KEYS | (DATA_ISLAND_KEYS if "data" in config.model_fields_set else set())
    useless = sorted(config.model_fields_set - SECTIONS)
    useless += [
        f"optimizer.{key}" for key in sorted(config.optimizer.model_fields_set - OPTIMIZER_KEYS)
    ]
    useless += [
        f"island.{key}" for key in sorted((config.island.model_fields_set | own.keys()) - allowed)
    ]
    if config.stages and "data" not in config.model_fields_set:
        useless.append("stages without data")
    useless += [
        f"stages[{number}].lr" for number, stage in enumerate(config.stages) if stage.lr is not None
    ]
    if useless:
        with_data = sorted(DATA_ISLAND_KEYS - allowed)
        more = f"; with `data` also {', '.join(with_data)}" if with_data else ""
        raise ConfigError(
            f"{where} sets {', '.join(useless)}, which `diloco train` follows and a loop of your "
            "own does not: your loop chooses model, optimizer, devices and checkpoints, and the "
            "learning rate of a stage by islands.stage. Take that out; allowed: name, seed, "
            "order_seed, outer, data and stages (read by diloco.data), optimizer.tokens_per_step, "
            f"and of an island {', '.join(sorted(allowed))}{more}"
        )
