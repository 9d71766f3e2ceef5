"""The file of an experiment: a base config, axes along which it varies, seeds, a baseline. Does not
import torch.

    name: inner-steps
    base: ../methods/diloco.yaml         # a path beside this file, or the content of a config
    overrides: {evaluate.tokens: 16384}  # any keys of a config, for all rows
    axes:                                # a row for each combination of one point from each axis
      - outer.inner_steps: [10, 30, 100]           # three points
      - {model.dim: [64, 96], model.ffn_dim: [256, 384]}  # keys of one axis are zipped: two points
      - [{outer.codec: int4}, {method: data-parallel}]    # points written out
    seeds: [0, 1, 2]

The keys of RowSettings may be used beside the keys of a config, in overrides and in axes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from diloco.config.errors import explain_errors
from diloco.config.yaml_file import read_yaml_text
from diloco.errors import ConfigError
from diloco.formatting import parse_bits_per_second, parse_seconds
from inner.config import Section
from inner.foreign.text import parse_yaml
from outer.network.endpoints import RUN_NAME

Point = dict[str, Any]
"""Values by key: dotted keys of a config, and keys of RowSettings."""
DATA_PARALLEL: Point = {"method": "data-parallel"}


def check_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Raise ValueError unless the seeds are different numbers of at least 0."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ValueError("at least one number, and different numbers from 0 on")
    return seeds


Seeds = Annotated[tuple[int, ...], AfterValidator(check_seeds)]


class RowSettings(Section):
    """Settings of a row besides its config. Each key may be set for all rows and in any axis."""

    config: str | dict[str, Any] | None = None
    """A config that replaces the experiment's `base` in this row."""
    method: Literal["islands", "data-parallel"] = "islands"
    """data-parallel: the same model, inner optimizer, tokens and text, with one gradient over all
    tokens of a step."""
    islands: int | None = Field(default=None, ge=1)
    """Number of islands. null: as in the config."""
    step_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one step of all islands together. null: each island has
    optimizer.tokens_per_step."""
    tokens: float | None = Field(default=None, gt=0)
    """Tokens of the whole run over all islands. null: those of outer.rounds x outer.inner_steps
    steps."""
    tokens_per_param: float | None = Field(default=None, gt=0)
    """Tokens of the whole run per parameter of the model, embeddings included. It replaces
    `tokens`."""
    steps_multiple_of: int = Field(default=1, ge=1)
    """`tokens` are rounded to a multiple of this number of steps, which each row's
    outer.inner_steps must divide."""
    evaluations: int = Field(default=20, ge=1)
    """Number of evaluations of the held-out loss, spread evenly over the run as far as its rounds
    allow."""

    seeds: Seeds | None = None
    """Seeds of this row, if they differ from the experiment's seeds, for example fewer seeds for
    larger models."""

    @model_validator(mode="after")
    def _one_length(self) -> "RowSettings":
        if self.tokens is not None and self.tokens_per_param is not None:
            raise ValueError(
                "tokens and tokens_per_param both give the run's length; set one of them"
            )
        return self


class ReportSettings(Section):
    """Content of the report in addition to the table."""

    link: str = "100mbit"
    """Rate of each island's link in each direction, for the simulated wall clock."""
    rtt: str = "50ms"
    step_seconds: float | None = Field(default=None, gt=0)
    """Seconds that one island takes for an inner step with its share of step_tokens, the same for
    all rows. null: the seconds are measured here for each model, on one core."""
    against: str | None = None
    """A key of an axis, or `params`: the last losses are also plotted against it."""

    @field_validator("link")
    @classmethod
    def _link_is_a_rate(cls, link: str) -> str:
        parse_bits_per_second(link)
        return link

    @field_validator("rtt")
    @classmethod
    def _rtt_is_a_time(cls, rtt: str) -> str:
        parse_seconds(rtt)
        return rtt


class Experiment(Section):
    """The content of an experiment's file."""

    name: str = Field(pattern=f"^{RUN_NAME}$")
    about: str = ""
    """The question that the experiment answers, for its summary."""
    base: str | dict[str, Any]
    overrides: Point = Field(default_factory=dict)
    axes: tuple[dict[str, tuple[Any, ...]] | tuple[Point, ...], ...] = ()
    seeds: Seeds = (0,)
    baseline: Literal["data-parallel"] | Point | None = "data-parallel"
    """Values that turn a row into its baseline, with which it is compared. data-parallel stands for
    {method: data-parallel}."""
    report: ReportSettings = ReportSettings()
    keep_checkpoints: bool = False
    """Keep the last checkpoint of the first island of each run, for example to export or fine-tune
    it."""

    @field_validator("axes")
    @classmethod
    def _keys_of_an_axis_are_zipped(cls, axes: tuple[Any, ...]) -> tuple[Any, ...]:
        for axis in axes:
            lengths = (
                {key: len(values) for key, values in axis.items()} if isinstance(axis, dict) else {}
            )
            if len(set(lengths.values())) > 1:
                raise ValueError(
                    "as many values for each key of one axis, because they are zipped (got "
                    f"{lengths}); put keys that are to be crossed into separate axes"
                )
        return axes

    @property
    def baseline_point(self) -> Point | None:
        """The values that turn a row into its baseline."""
        return DATA_PARALLEL if self.baseline == "data-parallel" else self.baseline  # type: ignore[return-value]


def load_experiment(path: Path) -> Experiment:
    """Load an experiment's file and all configs that it names into one object. Raises
    ConfigError.
    """
    values = load_yaml(path)
    if "base" not in values:
        raise ConfigError(_without_base(path, values))
    values["base"] = _inline(values["base"], path)
    for key in {"overrides", "baseline"} & values.keys():
        values[key] = _with_config(values[key], path)
    try:
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            "\n  ".join([f"{path}:", *explain_errors(error, Experiment, "")])
        ) from None
    axes = [
        {
            key: [_inline(value, path) for value in axis[key]] if key == "config" else axis[key]
            for key in axis
        }
        if isinstance(axis, dict)
        else [_with_config(point, path) for point in axis]
        for axis in experiment.axes
    ]
    return Experiment(**{**experiment.model_dump(), "axes": axes})


def dump_experiment(experiment: Experiment) -> str:
    """Return the experiment as YAML that refers to no other file."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)


def load_yaml(path: Path, what: str = "experiment") -> dict[str, Any]:
    """Return the values of a YAML file, which is called `what` in errors. Raises ConfigError."""
    text = read_yaml_text(path, what)
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: got {type(values).__name__}; keys with values expected, as in `name: "
            "inner-steps`"
        )
    return values


def _with_config(point: object, path: Path) -> object:
    """Return a point in which the path of a `config` is replaced by the content of its file."""
    if isinstance(point, Mapping) and "config" in point:
        return {**point, "config": _inline(point["config"], path)}
    return point


def _inline(value: object, path: Path) -> object:
    return load_yaml(path.parent / value, "config") if isinstance(value, str) else value


def _without_base(path: Path, values: Mapping[str, Any]) -> str:
    """Return what to say of a file that names no base: perhaps it is a config itself."""
    if {"model", "outer", "optimizer", "island", "islands"} & values.keys():
        return (
            f"{path} is a config of one run; an experiment is a file of its own that names a "
            f"config, as in `base: {path.name}`, and what to vary; docs/experiments.md describes it"
        )
    return (
        f"{path}: base is missing; it names the config that all rows share, as in `base: "
        "../quickstart.yaml`"
    )
