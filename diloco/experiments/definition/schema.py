"""The file of an experiment: a base config, axes along which it varies, seeds, a baseline. No torch here.

    name: inner-steps
    base: ../methods/diloco.yaml         # a path beside this file, or the content of a config
    overrides: {evaluate.tokens: 16384}  # any keys of a config, for all rows
    axes:                                # a row for each combination of one point from each axis
      - outer.inner_steps: [10, 30, 100]           # three points
      - {model.dim: [64, 96], model.ffn_dim: [256, 384]}  # keys of one axis are zipped: two points
      - [{outer.codec: int4}, {method: data-parallel}]    # points written out
    seeds: [0, 1, 2]

The keys of RowSettings may be used beside those of a config, in overrides and in axes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from diloco.config.errors import explain_errors
from diloco.errors import ConfigError
from diloco.formatting import parse_bits_per_second, parse_seconds
from inner.config import Section
from inner.foreign.text import parse_yaml
from outer.network.endpoints import RUN_NAME

Point = dict[str, Any]
"""Values by key: dotted keys of a config, and keys of RowSettings."""
DATA_PARALLEL: Point = {"method": "data-parallel"}


def check_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Raise ValueError unless these are different numbers from 0 on."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ValueError("different numbers from 0 on, at least one")
    return seeds


Seeds = Annotated[tuple[int, ...], AfterValidator(check_seeds)]


class RowSettings(Section):
    """What a row has besides its config. Each key may be set for all rows and in any axis."""

    config: str | dict[str, Any] | None = None
    """A config that replaces the experiment's `base` in this row."""
    method: Literal["islands", "data-parallel"] = "islands"
    """data-parallel: the same model, inner optimizer, tokens and text, with one gradient of all of a step's tokens."""
    islands: int | None = Field(default=None, ge=1)
    """Number of islands; None: as in the config."""
    step_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one step of all islands together. None: each island has optimizer.tokens_per_step."""
    tokens: float | None = Field(default=None, gt=0)
    """Tokens of the whole run over all islands. None: outer.rounds x outer.inner_steps steps."""
    tokens_per_param: float | None = Field(default=None, gt=0)
    """The same, for each parameter of the model, embeddings included."""
    steps_multiple_of: int = Field(default=1, ge=1)
    """`tokens` are rounded to a multiple of so many steps; each row's outer.inner_steps must divide it."""
    evaluations: int = Field(default=20, ge=1)
    """How often held-out loss is measured, evenly over the run, as far as rounds allow."""

    seeds: Seeds | None = None
    """Seeds of this row, where they are not those of the experiment, as for larger models."""

    @model_validator(mode="after")
    def _one_length(self) -> "RowSettings":
        if self.tokens is not None and self.tokens_per_param is not None:
            raise ValueError("tokens and tokens_per_param both give the run's length; set one of them")
        return self


class ReportSettings(Section):
    """What the report shows besides the table."""

    link: str = "100mbit"
    """Link of each island for the simulated wall clock: a rate in each direction."""
    rtt: str = "50ms"
    step_seconds: float | None = Field(default=None, gt=0)
    """Seconds in which one island makes an inner step of its share of step_tokens, the same for all rows. None: as
    measured here for each model, on one core."""
    against: str | None = None
    """A key of an axis, or `params`: the last losses are also drawn against it."""

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
    """What the experiment asks, for its summary."""
    base: str | dict[str, Any]
    overrides: Point = Field(default_factory=dict)
    axes: tuple[dict[str, tuple[Any, ...]] | tuple[Point, ...], ...] = ()
    seeds: Seeds = (0,)
    baseline: Literal["data-parallel"] | Point | None = "data-parallel"
    """Each row is compared with the row that it becomes with these values: data-parallel is {method: data-parallel}."""
    report: ReportSettings = ReportSettings()
    keep_checkpoints: bool = False
    """Keep the last checkpoint of the first island of each run, for example to export or fine-tune it."""

    @field_validator("axes")
    @classmethod
    def _keys_of_an_axis_are_zipped(cls, axes: tuple[Any, ...]) -> tuple[Any, ...]:
        for axis in axes:
            lengths = {key: len(values) for key, values in axis.items()} if isinstance(axis, dict) else {}
            if len(set(lengths.values())) > 1:
                raise ValueError(
                    f"as many values for each key of one axis, because they are zipped (got {lengths}); put keys that "
                    "are to be crossed into axes of their own"
                )
        return axes

    @property
    def baseline_point(self) -> Point | None:
        """The values that turn a row into its baseline."""
        return DATA_PARALLEL if self.baseline == "data-parallel" else self.baseline  # type: ignore[return-value]


def load_experiment(path: Path) -> Experiment:
    """Load an experiment's file with the configs that it names in it, so that it needs no other file. ConfigError."""
    values = load_yaml(path)
    values["base"] = _inline(values.get("base"), path)
    for key in {"overrides", "baseline"} & values.keys():
        values[key] = _with_config(values[key], path)
    try:
        experiment = Experiment.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n  ".join([f"{path}:", *explain_errors(error, Experiment, "")])) from None
    axes = [
        {key: [_inline(value, path) for value in axis[key]] if key == "config" else axis[key] for key in axis}
        if isinstance(axis, dict)
        else [_with_config(point, path) for point in axis]
        for axis in experiment.axes
    ]
    return Experiment(**{**experiment.model_dump(), "axes": axes})


def dump_experiment(experiment: Experiment) -> str:
    """The experiment as YAML that needs no other file."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)


def load_yaml(path: Path) -> dict[str, Any]:
    """The values of a YAML file. Raises ConfigError."""
    try:
        values = parse_yaml(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got {type(values).__name__}; keys with values expected, as in `name: inner-steps`")
    return values


def _with_config(point: object, path: Path) -> object:
    """A point in which the path of a `config` is replaced by the content of its file."""
    if isinstance(point, Mapping) and "config" in point:
        return {**point, "config": _inline(point["config"], path)}
    return point


def _inline(value: object, path: Path) -> object:
    return load_yaml(path.parent / value) if isinstance(value, str) else value
