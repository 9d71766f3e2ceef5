"""What a check of `diloco doctor` finds, and the island that it is about."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diloco.config.schema import Config, IslandConfig, RunConfig

CheckLevel = Literal["ok", "warning", "FAILED"]
CONNECT_SECONDS = 10.0
"""Longest wait for a swarm that does not answer."""


@dataclass(frozen=True)
class Check:
    """The result of one check: what was found and, if it is not ok, what to do."""

    level: CheckLevel
    name: str
    text: str


@dataclass(frozen=True)
class LocalIsland:
    """The island that the user wants to run on this machine. `run` is None if no config file is given."""

    run: RunConfig | None
    island: IslandConfig
    transport: str

    @property
    def folder(self) -> Path:
        return Path(self.island.run_dir).expanduser()

    @property
    def connect_seconds(self) -> float:
        return min(CONNECT_SECONDS, self.island.connect_seconds)


def resolve_local_island(config: Config | None, overrides_only: Config, address: str | None) -> LocalIsland:
    """The island that the config file describes, or else the overrides and the kind of address."""
    if config is not None:
        return LocalIsland(config.run, config.for_island(config.island.index), config.outer.transport)
    island = overrides_only.for_island(overrides_only.island.index)
    is_tcp = address is not None and address.startswith("tcp://")
    return LocalIsland(None, island, "gloo" if is_tcp else "hivemind")
