"""Resolve the file of an experiment to its rows, with the exact config of each row. Does not import
torch.
"""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import yaml
from pydantic import ValidationError

from diloco.config.check import check_fragments, check_island, model_specs
from diloco.config.errors import explain_errors
from diloco.config.init_weights import pin_weights_hash
from diloco.config.overrides import set_value
from diloco.config.schema import Config, fill_sizes, parse_config
from diloco.errors import ConfigError
from diloco.experiments.definition.methods import as_data_parallel, name_method
from diloco.experiments.definition.rows import Row, Rows, describe_point, label_rows
from diloco.experiments.definition.schema import Experiment, Point, RowSettings
from diloco.simulate.in_process import configure_in_process
from inner.measure.param_specs import num_elements
from inner.model.sizes import BYTE_VOCAB_SIZE

SAVES = 20
"""Number of checkpoints that a run makes. With this number, a killed run loses at most a twentieth
of its work."""


def build_rows(experiment: Experiment) -> Rows:
    """Resolve all rows. Raises ConfigError, which names the point, if a row is invalid."""
    found: dict[str, Row] = {}
    baselines: dict[str, Row] = {}
    own = [build_row(experiment, point) for point in build_points(experiment)]
    if (change := experiment.baseline_point) is not None:
        for row in own:
            baselines[row.row_id] = add_row(found, build_row(experiment, row.point | change))
    for row in own:
        add_row(found, row)
    return Rows(
        label_rows(list(found.values())),
        {row_id: found[base.row_id] for row_id, base in baselines.items()},
    )


def add_row(rows: dict[str, Row], row: Row) -> Row:
    """Add a row under its id. If a row with this id exists already, the result has the seeds of
    both.
    """
    known = rows.get(row.row_id, row)
    rows[row.row_id] = replace(known, seeds=tuple(sorted({*known.seeds, *row.seeds})))
    return known


def build_points(experiment: Experiment) -> list[Point]:
    """Return one point for each combination of the axes; the last axis varies fastest."""
    axes = [
        [dict(zip(axis, values, strict=True)) for values in zip(*axis.values(), strict=True)]
        if isinstance(axis, dict)
        else list(axis)
        for axis in experiment.axes
    ]
    return [
        dict(itertools.chain.from_iterable(point.items() for point in points))
        for points in itertools.product(*axes)
    ]


def build_row(experiment: Experiment, point: Point) -> Row:
    """Resolve one point. Raises ConfigError."""
    where = f"{experiment.name}: {describe_point(point) or 'the base config'}"
    settings, values = split_settings({**experiment.overrides, **point}, where)
    base = settings.config if settings.config is not None else experiment.base
    assert isinstance(base, dict), "load_experiment has read the files"
    config = build_config(copy.deepcopy(base), values, settings, where)
    num_params = count_params(config, where)
    total_steps = count_steps(config, settings, num_params, where)
    config = fit_rounds(config, total_steps, settings, where)
    if settings.method == "data-parallel":
        config = as_data_parallel(config, total_steps, settings.evaluations)
    config = fit_micro_batch(fit_saves(config))
    check_row(config, where)
    is_data_parallel = settings.method == "data-parallel"
    label = name_method(config, is_data_parallel=is_data_parallel)
    return Row(
        label, point, config, is_data_parallel, num_params, settings.seeds or experiment.seeds
    )


def split_settings(values: Point, where: str) -> tuple[RowSettings, Point]:
    """Split a point into the row's settings and the keys of its config. Raises ConfigError."""
    own = {key: value for key, value in values.items() if key in RowSettings.model_fields}
    try:
        settings = RowSettings(**own)
    except ValidationError as error:
        raise ConfigError(
            "\n  ".join([f"{where}:", *explain_errors(error, RowSettings, "")])
        ) from None
    return settings, {key: value for key, value in values.items() if key not in own}


def build_config(base: dict[str, Any], values: Point, settings: RowSettings, where: str) -> Config:
    """Return the config of islands in one process, before its length is set. Raises ConfigError."""
    for key, value in values.items():
        set_value(base, key, copy.deepcopy(value), where)
    listed = base.get("islands") or [{}]
    count = settings.islands or len(listed)
    base["islands"] = [listed[min(index, len(listed) - 1)] for index in range(count)]
    set_value(base, "island.ranks", 1, where)
    set_value(base, "island.mesh", {}, where)
    set_value(base, "outer.start_islands", count, where)
    if settings.step_tokens is not None:
        if settings.step_tokens % count:
            raise ConfigError(
                f"{where}: step_tokens: {settings.step_tokens} tokens of a step do not divide over "
                f"{count} islands; choose a multiple of the number of islands"
            )
        set_value(base, "optimizer.tokens_per_step", settings.step_tokens // count, where)
    config = parse_config(yaml.safe_dump(base), where=where)
    try:
        # The config includes the hash of the initial weights, so other weights in the same place
        # make another run.
        config = pin_weights_hash(fill_sizes(config))
        return configure_in_process(config, has_disturbances=False)
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('--in-process:')}") from None


def count_params(config: Config, where: str) -> int:
    """Return the number of parameters of the model. Raises ConfigError."""
    vocab_size = config.model.vocab_size or BYTE_VOCAB_SIZE
    if config.model.vocab_size is None and config.data.tokenizer != "bytes":
        raise ConfigError(
            f"{where}: model.vocab_size is not given, so the model's size follows from the "
            f"tokenizer {config.data.tokenizer!r}, which is not read for it; set model.vocab_size "
            "to the size of its vocabulary"
        )
    try:
        return num_elements(model_specs(config.run, vocab_size))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def count_steps(config: Config, settings: RowSettings, num_params: int, where: str) -> int:
    """Return the inner steps of the whole run. Raises ConfigError if they are no multiple of the
    row's inner_steps.
    """
    tokens = settings.tokens
    if settings.tokens_per_param is not None:
        tokens = settings.tokens_per_param * num_params
    if tokens is None:
        return config.total_steps
    of_a_step = config.optimizer.tokens_per_step * len(config.islands)
    multiple = settings.steps_multiple_of
    steps = max(round(tokens / of_a_step / multiple), 1) * multiple
    if settings.method == "islands" and steps % config.outer.inner_steps:
        raise ConfigError(
            f"{where}: {steps} steps are no multiple of outer.inner_steps, "
            f"{config.outer.inner_steps}, and rows of "
            "other lengths could not be compared; set steps_multiple_of to a common multiple of "
            "all inner steps"
        )
    return steps


def fit_rounds(config: Config, total_steps: int, settings: RowSettings, where: str) -> Config:
    """Return the config with the rounds that make `total_steps`, evaluated `settings.evaluations`
    times if possible.
    """
    rounds = max(total_steps // config.outer.inner_steps, 1)
    every = max(round(rounds / settings.evaluations), 1)
    return config.model_copy(
        update={
            "outer": config.outer.model_copy(update={"rounds": rounds}),
            "evaluate": config.evaluate.model_copy(update={"every_rounds": every}),
        }
    )


def fit_saves(config: Config) -> Config:
    """Return the config with checkpoints so frequent that a killed run loses little."""
    every = max(config.outer.rounds // SAVES, 1)
    checkpoint = {
        "every_rounds": every,
        "keep": 2,
        "folder": None,
        "mirror": None,
        "resume": "auto",
    }
    kept = config.island.checkpoint.model_copy(update=checkpoint)
    listed = tuple(
        {key: value for key, value in each.items() if key != "checkpoint"}
        for each in config.islands
    )
    return config.model_copy(
        update={"island": config.island.model_copy(update={"checkpoint": kept}), "islands": listed}
    )


def fit_micro_batch(config: Config) -> Config:
    """Return the config with the largest micro-batch that divides an island's sequences per step
    and the configured one.
    """
    sequences = config.optimizer.tokens_per_step // config.data.seq_len
    micro_batch = math.gcd(config.island.micro_batch, max(sequences, 1))
    return config.model_copy(
        update={"island": config.island.model_copy(update={"micro_batch": micro_batch, "auto": ()})}
    )


def check_row(config: Config, where: str) -> None:
    """Raise ConfigError if a run of this config cannot start."""
    for index in range(len(config.islands)):
        check_island(config.run, config.for_island(index), f"{where}: island {index}")
    check_fragments(config.run)
