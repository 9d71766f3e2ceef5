"""Writes the files with which clusters start the islands of a run, one for each island."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from diloco.config.check import check_island
from diloco.config.schema import load_config
from diloco.errors import ConfigError
from diloco.launch_files.islands import PlacedIsland, place_islands, require_relays
from diloco.launch_files.kubernetes import island_objects
from diloco.launch_files.skypilot import island_task
from inner.files import make_folder

Target = Literal["slurm", "kubernetes", "skypilot"]
SCRIPT = Path(__file__).with_name("slurm.sh")
"""What a SLURM job of an island runs."""
CONFIG = "run.yaml"
OVERRIDDEN = """\
# The islands' commands override: {settings}
"""


@dataclass(frozen=True)
class ClusterOptions:
    """Settings of the cluster, which are not in the config."""

    address: str
    """The address that `diloco bootstrap` prints."""
    gpus_per_node: int = 8
    image: str | None = None
    """A container image in which `python -m diloco` runs; for kubernetes and skypilot."""
    gpu: str = "H100"
    """Kind of GPU, as SkyPilot names it."""


@dataclass(frozen=True)
class GivenConfig:
    """The config as the user has given it."""

    text: str
    """The file's own text, after a line with the overrides if there are any."""
    overrides: tuple[str, ...]


def read_given(config: Path, overrides: Sequence[str]) -> GivenConfig:
    """Read the file, and write above its text which keys the overrides change."""
    above = OVERRIDDEN.format(settings=shlex.join(overrides)) if overrides else ""
    return GivenConfig(above + config.read_text(), tuple(overrides))


def write_launch_files(
    target: Target, config: Path, overrides: Sequence[str], out: Path, options: ClusterOptions
) -> list[Path]:
    """Write run.yaml and one file for each island into `out`; return the islands' files.

    run.yaml is the user's file, with its comments; overrides are in the islands' commands. Raises
    ConfigError.
    """
    resolved = load_config(config, overrides)
    placed = place_islands(resolved, options.gpus_per_node)
    for island in placed:
        check_island(resolved.run, resolved.for_island(island.index), island.label)
    if target != "slurm":
        require_relays(resolved)
        if options.image is None:
            raise ConfigError(
                f"--image: {target} needs an image in which `python -m diloco` runs; none was given"
            )
    make_folder(out, "--out")
    given = read_given(config, overrides)
    (out / CONFIG).write_text(given.text)
    if target == "slurm":
        shutil.copy(SCRIPT, out)
    written = [out / f"{island.label}.{'sh' if target == 'slurm' else 'yaml'}" for island in placed]
    for path, island in zip(written, placed, strict=True):
        path.write_text(island_file(target, island, given, out, options))
    return written


def island_file(
    target: Target, island: PlacedIsland, given: GivenConfig, out: Path, options: ClusterOptions
) -> str:
    """Return the text of an island's file."""
    settings = [*given.overrides, f"island.bootstrap=[{options.address}]"]
    if target == "slurm":
        return submission(island, given, out, options)
    assert options.image is not None, "the image has been checked"
    if target == "skypilot":
        return yaml.safe_dump(
            island_task(island, options.image, options.gpu, settings), sort_keys=False
        )
    return yaml.safe_dump_all(
        island_objects(island, given.text, options.image, settings),
        sort_keys=False,
        explicit_start=True,
    )


def submission(island: PlacedIsland, given: GivenConfig, out: Path, options: ClusterOptions) -> str:
    """Return a shell script that submits the island's job. By default the job runs this program's
    own Python.
    """
    values = {"CONFIG": str(out / CONFIG), "INDEX": str(island.index), "BOOTSTRAP": options.address}
    exports = "".join(
        f"export DILOCO_{name}={shlex.quote(value)}\n" for name, value in values.items()
    )
    python = f'export DILOCO_PYTHON="${{DILOCO_PYTHON:-{sys.executable}}}"\n'
    size = f"--nodes {island.nodes} --gpus-per-node {island.gpus}"
    job = shlex.join([str(out / SCRIPT.name), *given.overrides])
    return (
        f"#!/usr/bin/env bash\n# Arguments go to sbatch.\n{exports}{python}exec sbatch {size} "
        f'"$@" {job}\n'
    )
