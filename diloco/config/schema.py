"""The config of a run: loading, overrides, validation and hash. Importing this does not import
torch.

One YAML file holds two kinds of config:

    RunConfig     the same on every island: model, data, optimizer, outer. Its hash is part of the
                  run's identity, and a joining island gets its text from the swarm (from_swarm.py).
    IslandConfig  local to an island: mesh, micro-batch, device, addresses, folders. `island` holds
                  the values that all islands of the file share, `islands` the changes of each one.

Precedence: defaults < `island` < `islands[index]` < command line (`section.key=value`).
"""

import hashlib
import json
import typing
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from diloco.config.errors import explain_errors
from diloco.config.island import IslandConfig
from diloco.config.overrides import apply_override, merge
from diloco.config.yaml_file import read_yaml_text
from diloco.errors import ConfigError
from inner.config import (
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    OptimizerConfig,
    Section,
    StageConfig,
)
from inner.config.stages import check_stages, count_stage_cycles
from inner.errors import InputError
from inner.files import home_path
from inner.foreign.text import parse_yaml
from inner.huggingface.model_config import fill_sizes_from_folder
from outer.config import OuterConfig
from outer.network.endpoints import RUN_NAME


class RunConfig(Section):
    """The part of the config that all islands of a run share."""

    name: str = Field(default="run", pattern=f"^{RUN_NAME}$")
    """Name of the run: its folder in island.run_dir, and part of its identity in the swarm."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights, of the reading order and of all other random numbers of the
    run."""
    order_seed: int | None = Field(default=None, ge=0)
    """Seed of the reading order alone, to separate its effect from the effect of the initial
    weights. null uses `seed`."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    outer: OuterConfig = OuterConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    stages: tuple[StageConfig, ...] = ()
    """Changes of mixture, sequence length, batch size and learning rate during the run. Empty:
    none."""
    params: str = ""
    """Identifies the trained parameters if your own training loop uses `diloco.Islands`, which
    fills it in."""
    param_names: tuple[str, ...] = ()
    """Names and shapes of the first of these parameters, each as the number of characters that it
    shares with the one before, and the rest. `diloco.Islands` fills it in, so that an error can
    name the first difference. Not part of the run's hash."""
    code_sha256: dict[str, str] = Field(default_factory=dict)
    """Hash of each file of own code, by import path. It is filled in when the run starts, and not
    part of the run's hash."""

    @model_validator(mode="after")
    def _moments_are_adamws(self) -> "RunConfig":
        optimizer = self.optimizer
        if self.outer.moments is not None and (
            optimizer.name != "adamw" or optimizer.averaging is not None
        ):
            averaging = ", averaged" if optimizer.averaging is not None else ""
            raise ValueError(
                "outer.moments needs plain AdamW, and the inner optimizer is "
                f"{optimizer.name}{averaging}; set "
                "optimizer.name to adamw and optimizer.averaging to null, or outer.moments to null"
            )
        if self.outer.moments is not None and optimizer.state_dtype != "float32":
            raise ValueError(
                "outer.moments averages moments in float32, and optimizer.state_dtype is "
                f"{optimizer.state_dtype}; "
                "set it to float32, or outer.moments to null"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> "RunConfig":
        check_stages_of_run(self)
        return self

    @property
    def reading_seed(self) -> int:
        """The seed of the reading order."""
        return self.seed if self.order_seed is None else self.order_seed

    @property
    def total_steps(self) -> int:
        """Number of inner steps of one island in the whole run."""
        return self.outer.rounds * self.outer.inner_steps

    @property
    def total_tokens(self) -> int:
        """Number of tokens in all inner steps of the run, over the islands with which it starts."""
        return sum(cycles * tokens for cycles, tokens in stage_cycles(self))

    @property
    def hash(self) -> str:
        """Hex digest of all values on which the islands must agree."""
        unset = {name for name in ("params", "stages") if not getattr(self, name)}
        unset |= {"order_seed"} if self.order_seed is None else set()
        not_agreed: dict[str, Any] = dict.fromkeys({"code_sha256", "param_names"} | unset, True)
        not_agreed["data"] = {name for name in ("eos", "bos") if getattr(self.data, name) is None}
        not_agreed["model"] = self.model.later_defaults
        not_agreed["optimizer"] = self.optimizer.later_defaults
        not_agreed["outer"] = self.outer.later_defaults
        text = json.dumps(self.model_dump(mode="json", exclude=not_agreed), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def initial_weights(self, island: IslandConfig) -> Path | None:
        """Return the folder of the weights from which the island starts; None for the seed's
        weights or another's state.
        """
        if self.model.init_from is None or island.joins:
            return None
        return home_path(island.init_from or self.model.init_from, "model.init_from")


class Config(RunConfig):
    """The content of a config file. `run` and `for_island` split it into its two kinds."""

    island: IslandConfig = IslandConfig()
    islands: tuple[dict[str, Any], ...] = ()
    """Settings of `island` that differ between islands: one entry per island. `simulate` starts one
    island per entry."""

    @model_validator(mode="after")
    def _islands_are_valid(self) -> "Config":
        for index in range(len(self.islands)):
            self.for_island(index)
        return self

    @property
    def run(self) -> RunConfig:
        """The part of the config that all islands share."""
        return RunConfig(**{key: getattr(self, key) for key in RunConfig.model_fields})

    def for_island(self, index: int) -> IslandConfig:
        """Return the config of one island: `island`, overridden by `islands[index]`."""
        change = self.islands[index] if index < len(self.islands) else {}
        try:
            return IslandConfig(**merge(self.island.model_dump(), {"index": index} | change))
        except ValidationError as error:
            raise ConfigError(
                "\n".join(explain_errors(error, IslandConfig, f"islands[{index}]."))
            ) from None


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Load a YAML file, apply `section.key=value` overrides, read sizes from model.init_from.
    Raises ConfigError.
    """
    path = Path(path)
    return fill_sizes(parse_config(read_yaml_text(path, "config"), overrides, where=str(path)))


def fill_sizes(config: Config) -> Config:
    """Return the config with the sizes of the model that model.init_from names, if any. Raises
    ConfigError.
    """
    try:
        folder = config.initial_weights(config.for_island(config.island.index))
        if folder is None:
            return config
        return config.model_copy(update={"model": fill_sizes_from_folder(config.model, folder)})
    except InputError as error:
        raise ConfigError(str(error)) from None


def parse_config(text: str, overrides: typing.Sequence[str] = (), where: str = "config") -> Config:
    """Parse a YAML text and apply overrides. Error messages call the text `where`. Raises
    ConfigError.
    """
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        got = "text" if isinstance(values, str) else f"a {type(values).__name__}"
        raise ConfigError(
            f"{where}: got {got}; a config is sections with keys, as in `outer: {{rounds: 40}}`"
        )
    for override in overrides:
        apply_override(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n  ".join([f"{where}:", *explain_errors(error, Config, "")])) from None


def dump_config(config: BaseModel) -> str:
    """Return the resolved config as YAML with all values, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def at_stage(run: RunConfig, number: int) -> RunConfig:
    """Return the config for stage `number` of the run, counted from 0."""
    if not run.stages:
        return run
    data, optimizer = run.stages[number].apply(run.data, run.optimizer)
    return run.model_copy(update={"data": data, "optimizer": optimizer})


def stage_cycles(run: RunConfig) -> list[tuple[int, int]]:
    """Return for each stage its number of cycles, and the tokens of one cycle over the islands with
    which the run starts. A run without stages has one stage.
    """
    outer = run.outer
    steps_of_all = outer.inner_steps * outer.start_islands
    stages = [at_stage(run, number) for number in range(len(run.stages) or 1)]
    tokens = [steps_of_all * stage.optimizer.tokens_per_step for stage in stages]
    cycles = count_stage_cycles(run.stages, tokens)
    return [*zip([*cycles, outer.rounds - sum(cycles)], tokens, strict=True)]


def stage_rounds(run: RunConfig) -> tuple[int, ...]:
    """Return the first round of each stage after the first, if islands wait for all. It is always
    the first round of a cycle.
    """
    ends = accumulate(cycles for cycles, _ in stage_cycles(run)[:-1])
    return tuple(cycle * run.outer.fragments for cycle in ends)


def stage_tokens(run: RunConfig) -> tuple[int, ...]:
    """Return the committed tokens with which each stage after the first begins, if islands wait
    for a quorum.
    """
    return tuple(accumulate(cycles * tokens for cycles, tokens in stage_cycles(run)[:-1]))


def count_inner_steps(run: RunConfig, tokens: int) -> int:
    """Convert committed tokens of the run to inner steps, shared equally by the islands that
    begin.
    """
    steps = 0
    *ended, last = stage_cycles(run)
    for cycles, cycle_tokens in ended:
        if tokens < cycles * cycle_tokens:
            last = cycles, cycle_tokens
            break
        steps += cycles * run.outer.inner_steps
        tokens -= cycles * cycle_tokens
    return steps + tokens * run.outer.inner_steps // last[1]


def most_tokens_per_step(run: RunConfig) -> int:
    """Return the tokens of an island's largest step in the run."""
    return max(
        (at_stage(run, n).optimizer.tokens_per_step for n in range(len(run.stages))), default=0
    ) or (run.optimizer.tokens_per_step)


def longest_sequence(run: RunConfig) -> int:
    """Return the tokens of the longest sequence of the run."""
    return max(
        (at_stage(run, number).data.seq_len for number in range(len(run.stages))),
        default=run.data.seq_len,
    )


def check_stages_of_run(run: RunConfig) -> None:
    """Raise ValueError if the run's stages cannot be carried out."""
    if not run.stages:
        return
    if run.data.owners:
        raise ValueError(
            "stages: got a source that only some islands read (`only`), which is not possible; "
            "leave out one of the two"
        )
    check_stages(run.stages, run.data, run.optimizer)
    if run.outer.gossip is not None:
        raise ValueError(
            "stages begin with a commit of all islands, and outer has gossip; leave out one of the "
            "two"
        )
    if (needed := stage_rounds(run)[-1:]) and needed[0] >= run.outer.num_rounds:
        raise ValueError(
            f"stages: the last one would begin after {needed[0] // run.outer.fragments} cycles, "
            "and outer.rounds is "
            f"{run.outer.rounds}; raise outer.rounds or lower the tokens of earlier stages"
        )
