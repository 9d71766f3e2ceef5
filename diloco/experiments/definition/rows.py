"""The rows of an experiment and their runs: what each is called, and the hash by which it is found. No torch here."""

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

ISLAND_KEYS = ("micro_batch", "compute_dtype", "device", "matmul_precision", "init_from", "tokenizer", "data_paths")
"""Settings of an island that its numbers depend on."""
COVERED = ("config", "method", "islands", "outer", "step_tokens", "steps_multiple_of", "evaluations", "model", "seeds")
ALSO_COVERED = (
    "optimizer.name",
    "optimizer.averaging",
    "optimizer.averaging.x",
    "optimizer.averaging.y",
    "optimizer.muon_row_beta",
    "optimizer.momentum_weight",
)
"""Keys whose values the name of the method or the size of the model shows, or that are no part of a comparison."""


@dataclass(frozen=True)
class Row:
    """A method with all settings but the seed."""

    label: str
    point: Point
    config: Config
    """With seed 0."""
    is_data_parallel: bool
    num_params: int
    seeds: tuple[int, ...]

    @cached_property
    def row_id(self) -> str:
        """Hex digest of the resolved config without its name and seed."""
        return hash_config(self.config, with_seed=False)

    def run(self, seed: int) -> "Run":
        """The run of this row with a seed."""
        config = self.config.model_copy(update={"seed": seed})
        return Run(self, seed, config, hash_config(config, with_seed=True))

    @property
    def step_tokens(self) -> int:
        """Tokens of one step of all islands together."""
        return self.config.optimizer.tokens_per_step * len(self.config.islands)

    def value(self, key: str) -> Any:
        """The row's value of a key of its point, or of `params`; None if it has none."""
        return self.num_params if key == "params" else self.point.get(key)


@dataclass(frozen=True)
class Run:
    """A row with a seed: one training."""

    row: Row
    seed: int
    config: Config
    run_id: str
    """Hex digest of everything that the result depends on."""

    @property
    def label(self) -> str:
        return f"{self.row.label}, seed {self.seed}"


@dataclass(frozen=True)
class Rows:
    """The rows of an experiment, baselines first, and the baseline of each row by the row's id."""

    rows: list[Row]
    baselines: dict[str, Row]


def hash_config(config: Config, *, with_seed: bool) -> str:
    """Hex digest of what the numbers of a run depend on. Keys with default values are left out.

    So a later version, which has more keys, finds the runs of this one. Own code counts by the hash of its file: a
    run of a file that was edited since is another run. Raises ConfigError if it cannot be imported.
    """
    excluded = {"name", "code_sha256"} | (set() if with_seed else {"seed"})
    islands = [config.for_island(index) for index in range(len(config.islands))]
    content = {
        "run": config.run.model_dump(mode="json", exclude=excluded, exclude_defaults=True),
        "islands": [
            island.model_dump(mode="json", include=set(ISLAND_KEYS), exclude_defaults=True) for island in islands
        ],
    }
    if hashes := add_code_hashes(config.run).code_sha256:
        content["code"] = hashes
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def label_rows(rows: list[Row]) -> list[Row]:
    """The rows with labels that tell them apart: the method, then what else varies."""
    extents = [describe for describe in (size_of, step_of) if len({describe(row) for row in rows}) > 1]
    labelled = [
        replace(
            row, label=", ".join([row.label, *describe_others(row.point), *(describe(row) for describe in extents)])
        )
        for row in rows
    ]
    times = Counter(row.label for row in labelled)
    return [
        row if times[row.label] == 1 else replace(row, label=f"{row.label} ({describe_point(row.point)})")
        for row in labelled
    ]


def size_of(row: Row) -> str:
    return f"{human_count(row.num_params)} params"


def step_of(row: Row) -> str:
    return f"{row.step_tokens} tokens per step"


def describe_others(point: Point) -> list[str]:
    """The values of a point that the name of its method does not show: `lr 0.003`."""
    covered = {key for key in point if key.split(".")[0] in COVERED or key in ALSO_COVERED}
    others = {key: value for key, value in point.items() if key not in covered}
    return [f"{key.rpartition('.')[2].replace('_', ' ')} {short(value)}" for key, value in others.items()]


def describe_point(point: Point) -> str:
    """A point on one line."""
    return ", ".join(f"{key}={short(value)}" for key, value in point.items() if key != "config" or len(point) == 1)


def short(value: Any) -> str:
    """A value on one line; of a whole config its name."""
    if isinstance(value, dict):
        return str(value["name"]) if "name" in value else yaml.safe_dump(value, default_flow_style=True).strip()
    return f"{value:g}" if isinstance(value, float) else str(value)


def select(rows: Iterable[Row], wanted: list[str]) -> list[Row]:
    """The rows whose number (from 1) or part of whose label is wanted; all if nothing is. Raises ConfigError."""
    rows = list(rows)
    chosen: list[Row] = []
    for text in wanted:
        found = [row for row in rows if text.lower() in row.label.lower()]
        if text.isdecimal():
            found = rows[int(text) - 1 : int(text)] if int(text) else []
        if not found:
            raise ConfigError(f"--only {text!r}: no row has this number or text; --plan lists the rows")
        chosen += found
    return [row for row in rows if row in chosen] if wanted else rows
