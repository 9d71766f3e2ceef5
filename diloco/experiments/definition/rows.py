"""The rows of an experiment and their runs: their labels, and the hash that identifies a run.
Imports no torch.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import yaml

from diloco.config.own_code import add_code_hashes
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.experiments.definition.schema import Point
from diloco.formatting import human_count

ISLAND_KEYS = (
    "micro_batch",
    "compute_dtype",
    "device",
    "matmul_precision",
    "init_from",
    "tokenizer",
    "data_paths",
)
"""Settings of an island on which the numbers of its run depend."""
COVERED = (
    "config",
    "method",
    "islands",
    "outer",
    "step_tokens",
    "steps_multiple_of",
    "evaluations",
    "model",
    "seeds",
)
ALSO_COVERED = (
    "optimizer.name",
    "optimizer.averaging",
    "optimizer.averaging.x",
    "optimizer.averaging.y",
    "optimizer.muon_row_beta",
    "optimizer.momentum_weight",
)
"""Keys that no label shows: the method's name or the model's size shows their values, or they are
not compared."""


@dataclass(frozen=True)
class Row:
    """A method with all settings except the seed."""

    label: str
    point: Point
    config: Config
    """The config with seed 0."""
    is_data_parallel: bool
    num_params: int
    seeds: tuple[int, ...]

    @cached_property
    def row_id(self) -> str:
        """Hex digest of the resolved config, without its name and seed."""
        return hash_config(self.config, with_seed=False)

    def run(self, seed: int) -> "Run":
        """Return the run of this row with a seed."""
        config = self.config.model_copy(update={"seed": seed})
        return Run(self, seed, config, hash_config(config, with_seed=True))

    @property
    def step_tokens(self) -> int:
        """Tokens of one step of all islands together."""
        return self.config.optimizer.tokens_per_step * len(self.config.islands)

    def value(self, key: str) -> Any:
        """Return the row's value of a key of its point, or of `params`; None if the row has no such
        value.
        """
        return self.num_params if key == "params" else self.point.get(key)


@dataclass(frozen=True)
class Run:
    """A row with a seed, which is one training run."""

    row: Row
    seed: int
    config: Config
    run_id: str
    """Hex digest of everything on which the result depends."""

    @property
    def label(self) -> str:
        return f"{self.row.label}, seed {self.seed}"


@dataclass(frozen=True)
class Rows:
    """The rows of an experiment, baselines first, and the baseline of each row by the row's id."""

    rows: list[Row]
    baselines: dict[str, Row]


def hash_config(config: Config, *, with_seed: bool) -> str:
    """Return the hex digest of all settings on which the numbers of a run depend.

    Keys with default values are left out, so a later version with more keys finds the runs of this
    version. Own code counts by the hash of its file: after an edit of the file, it is another run.
    Raises ConfigError if the code cannot be imported.
    """
    excluded = {"name", "code_sha256"} | (set() if with_seed else {"seed"})
    islands = [config.for_island(index) for index in range(len(config.islands))]
    content = {
        "run": config.run.model_dump(mode="json", exclude=excluded, exclude_defaults=True),
        "islands": [
            island.model_dump(mode="json", include=set(ISLAND_KEYS), exclude_defaults=True)
            for island in islands
        ],
    }
    if hashes := add_code_hashes(config.run).code_sha256:
        content["code"] = hashes
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def label_rows(rows: list[Row]) -> list[Row]:
    """Return the rows with distinct labels: the method, then what else varies."""
    extents = [
        describe for describe in (size_of, step_of) if len({describe(row) for row in rows}) > 1
    ]
    labelled = [
        replace(
            row,
            label=", ".join(
                [row.label, *describe_others(row.point), *(describe(row) for describe in extents)]
            ),
        )
        for row in rows
    ]
    times = Counter(row.label for row in labelled)
    return [
        row
        if times[row.label] == 1
        else replace(row, label=f"{row.label} ({describe_point(row.point)})")
        for row in labelled
    ]


def size_of(row: Row) -> str:
    return f"{human_count(row.num_params)} params"


def step_of(row: Row) -> str:
    return f"{row.step_tokens} tokens per step"


def describe_others(point: Point) -> list[str]:
    """Return the values of a point that the method's name does not show, such as `lr 0.003`."""
    covered = {key for key in point if key.split(".")[0] in COVERED or key in ALSO_COVERED}
    others = {key: value for key, value in point.items() if key not in covered}
    return [
        f"{key.rpartition('.')[2].replace('_', ' ')} {short(value)}"
        for key, value in others.items()
    ]


def describe_point(point: Point) -> str:
    """Return a point as one line of text."""
    return ", ".join(
        f"{key}={short(value)}"
        for key, value in point.items()
        if key != "config" or len(point) == 1
    )


def short(value: Any) -> str:
    """Return a value as one line of text; for a whole config its name."""
    if isinstance(value, dict):
        return (
            str(value["name"])
            if "name" in value
            else yaml.safe_dump(value, default_flow_style=True).strip()
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def select(rows: Iterable[Row], wanted: list[str]) -> list[Row]:
    """Return the rows with a wanted number (from 1) or label part; all rows if `wanted` is empty.
    Raises ConfigError.
    """
    rows = list(rows)
    chosen: list[Row] = []
    for text in wanted:
        found = [row for row in rows if text.lower() in row.label.lower()]
        if text.isdecimal():
            found = rows[int(text) - 1 : int(text)] if int(text) else []
        if not found:
            raise ConfigError(
                f"--only {text!r}: no row has this number or text; --plan lists the rows"
            )
        chosen += found
    return [row for row in rows if row in chosen] if wanted else rows
