"""The config of a run: read, overridden, checked, hashed. No torch here.

Two kinds, in one YAML file:

    RunConfig     the same on every island: model, data, optimizer, outer. Hashed; the hash is part of the
                  run's identity, and a joiner gets the text from the swarm.
    IslandConfig  local to an island: mesh, micro-batch, device, addresses, folders. `island` holds what all
                  islands of the file share, `islands` what each one changes.

Precedence: defaults < `island` < `islands[index]` < command line (`section.key=value`).
"""

import hashlib
import json
import typing
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from diloco.config_errors import explain
from inner.config import (
    DataConfig,
    EvaluateConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    Section,
)
from inner.errors import InputError
from inner.huggingface.model_config import sized_as_in
from outer.config import OuterConfig


class ConfigError(ValueError):
    """The config cannot be used; the text says what, where, got, allowed and the cure."""


class RunConfig(Section):
    """What every island of a run shares."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    seed: int = Field(default=0, ge=0)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    outer: OuterConfig = OuterConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _moments_are_adamws(self) -> "RunConfig":
        optimizer = self.optimizer
        if self.outer.moments is not None and (optimizer.name != "adamw" or optimizer.averaging is not None):
            averaging = ", averaged" if optimizer.averaging is not None else ""
            raise ValueError(
                f"outer.moments are those of AdamW alone, and the inner optimizer is {optimizer.name}{averaging}; set "
                "optimizer.name to adamw and optimizer.averaging to null, or outer.moments to null"
            )
        return self

    @property
    def total_steps(self) -> int:
        """Inner steps of the whole run, on one island."""
        return self.outer.rounds * self.outer.inner_steps

    @property
    def total_tokens(self) -> int:
        """Of all islands that begin, in all inner steps of the run."""
        return self.total_steps * self.optimizer.tokens_per_step * self.outer.start_islands

    @property
    def hash(self) -> str:
        """Hex digest of everything the islands must agree on."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def initial_weights(self, island: "IslandConfig") -> Path | None:
        """The folder of the island's first weights; None: they follow from the seed, or others' state replaces them."""
        if self.model.init_from is None or island.joins:
            return None
        return Path(island.init_from or self.model.init_from).expanduser()


class CheckpointConfig(Section):
    """When an island saves all that it needs to go on after a stop, and where."""

    every_rounds: int | None = Field(default=10, ge=1)
    """Times that every parameter is averaged, from one checkpoint to the next; also after the last. null: none."""
    keep: int = Field(default=2, ge=1)
    """Older ones are deleted."""
    folder: str | None = None
    """None: `checkpoints` in the island's folder. Ranks of one island must all see it."""
    mirror: str | None = None
    """A URL that fsspec knows (s3://bucket/run) or another disk's folder, where each checkpoint is copied to, too; an
    island whose own folder has none as new goes on from the copy."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest whole checkpoint in the folder, if there is one."""


class IslandConfig(Section):
    """What is one island's own business."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """None: `island-<index>`."""
    index: int = Field(default=0, ge=0)
    ranks: int = Field(default=1, ge=1)
    """Processes of this island; torchrun's --nproc-per-node times its nodes."""
    mesh: MeshConfig = MeshConfig()
    parallel: ParallelConfig = ParallelConfig()
    micro_batch: int = Field(default=8, ge=1)
    """Sequences of one forward pass on one rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    bootstrap: tuple[str, ...] = ()
    """Addresses of the swarm, as `diloco bootstrap` prints them."""
    listen_host: str = "127.0.0.1"
    listen_port: int = Field(default=0, ge=0, le=65535)
    announce_host: str | None = None
    """The address other islands reach this one at, when it is not listen_host (NAT, cloud)."""
    run_key_file: str | None = None
    """A file with the run's key, the same on every island: without it nobody joins and no message is taken."""
    allow: tuple[str, ...] = ()
    """hivemind: the peer ids that may connect; empty: all."""
    relay: Literal["off", "client", "server"] = "off"
    """hivemind behind a NAT: `client` is reached through relays and hole punching, `server` relays for others."""
    faults: tuple[str, ...] = ()
    """Faults that this island inflicts on itself, as `diloco simulate --fault` writes them; for tests."""
    joins: bool = False
    """Take the state of a running run, never begin one."""
    run_dir: str = "runs"
    cache_dir: str = "~/.cache/diloco"
    data_paths: tuple[str, ...] | None = None
    """Replaces data.paths on this island."""
    init_from: str | None = None
    """Replaces model.init_from on this island: the folder of the same weights here."""
    connect_seconds: float = Field(default=30.0, gt=0)
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog_seconds: float | None = Field(default=None, gt=0)
    """An inner step or evaluation that takes longer ends the island; not the first ones. None: by their times."""
    max_hours: float | None = Field(default=None, gt=0)
    """The island leaves after the last round that fits, counted from its start, torchrun's restarts included."""
    profile: ProfileConfig = ProfileConfig()
    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"

    @property
    def island(self) -> str:
        """The island's name in the run."""
        return self.name or f"island-{self.index}"


class Config(RunConfig):
    """A whole file. `run` and `for_island` split it into its two kinds."""

    island: IslandConfig = IslandConfig()
    islands: tuple[dict[str, Any], ...] = ()

    @model_validator(mode="after")
    def _islands_are_valid(self) -> "Config":
        for index in range(len(self.islands)):
            self.for_island(index)
        return self

    @property
    def run(self) -> RunConfig:
        """The part that every island shares."""
        return RunConfig(**{key: getattr(self, key) for key in RunConfig.model_fields})

    def for_island(self, index: int) -> IslandConfig:
        """The island's own part: `island`, then `islands[index]` over it."""
        base = self.island.model_dump()
        change = self.islands[index] if index < len(self.islands) else {}
        try:
            return IslandConfig(**_merge(base, {"index": index} | change))
        except ValidationError as error:
            raise ConfigError("\n".join(explain(error, IslandConfig, f"islands[{index}]."))) from None


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """The config in a YAML file with `section.key=value` overrides applied; sizes from model.init_from. ConfigError."""
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8; a config is a YAML file, as those in configs/") from None
    return _with_sizes(parse_config(text, overrides, where=str(path)))


def parse_config(text: str, overrides: typing.Sequence[str] = (), where: str = "config") -> Config:
    """The config in a YAML text. Raises ConfigError."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        got = "text" if isinstance(values, str) else f"a {type(values).__name__}"
        raise ConfigError(f"{where}: got {got}; a config is sections with keys, as in `outer: {{rounds: 40}}`")
    for override in overrides:
        _apply_override(values, override)
    return _validate(values, where)


def _with_sizes(config: Config) -> Config:
    folder = config.initial_weights(config.for_island(config.island.index))
    if folder is None:
        return config
    try:
        return config.model_copy(update={"model": sized_as_in(config.model, folder)})
    except InputError as error:
        raise ConfigError(str(error)) from None


def dump_config(config: BaseModel) -> str:
    """The resolved config as YAML, every value written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def differing_keys(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """One line for each key that two runs do not share, with both values."""
    flat_ours, flat_theirs = flatten(ours.model_dump(mode="json")), flatten(theirs.model_dump(mode="json"))
    return [
        f"{key}: here {flat_ours.get(key)!r}, in the run {flat_theirs.get(key)!r}"
        for key in flat_ours | flat_theirs
        if flat_ours.get(key) != flat_theirs.get(key)
    ]


def _validate(values: dict[str, Any], where: str) -> Config:
    try:
        return Config(**values)
    except ValidationError as error:
        lines = explain(error, Config, "")
        raise ConfigError(f"{where}:\n" + "\n".join(f"  {line}" for line in lines)) from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"got {override!r} on the command line; an override is written section.key=value")
    _set(values, key, text, override)
    islands = values.get("islands")
    if key.startswith("island.") and isinstance(islands, list):
        # Else what an island says for itself would win over the command line.
        for island in islands:
            if isinstance(island, dict):
                _set(island, key.removeprefix("island."), text, override)


def _set(target: dict[str, Any], key: str, text: str, override: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        child = target.setdefault(section, {})
        if child is None:
            child = target[section] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{override!r}: {section!r} is a value, not a section")
        target = child
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        target[last] = text


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A dumped config's values by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
