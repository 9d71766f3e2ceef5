"""Read the global params of a run, unsharded, from the checkpoints of its islands, in one process."""

import warnings
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from diloco.config.schema import RunConfig
from diloco.records.run_folder import natural_key
from inner.checkpoint import folder as disk
from inner.checkpoint.folder import SavedCheckpoint
from inner.errors import InputError
from inner.param_spec import ParamSpec
from outer.codecs.choice import build_space
from outer.rounds.checkpoint import PARAMS, parse_facts

FOLDER = "checkpoints"


def read_global_params(run_dir: Path, island: str | None = None) -> tuple[RunConfig, dict[str, torch.Tensor]]:
    """The run's config and its global params, fp32 by full name, from the checkpoint with the latest round.

    `run_dir` may be the folder of a run, of an island, or of one checkpoint. Raises InputError if there is no
    checkpoint or all are damaged.
    """
    checkpoint = find_newest_checkpoint(run_dir, island)
    try:
        run = RunConfig(**checkpoint.facts["run"])
        specs = [ParamSpec(name, tuple(shape)) for name, shape in checkpoint.facts["params"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{checkpoint.path}: not a checkpoint of an island of this version: {error!r}") from None
    space = build_space(specs, run.outer)
    flat = torch.empty(space.num_elements)
    parts = {f"{PARAMS}{p.index}": flat[p.start : p.stop] for p in space.parts if not p.is_moment}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(parts, storage_reader=dcp.FileSystemReader(checkpoint.path), no_dist=True)
    starts = space.offsets
    return run, {s.name: flat[starts[s.name] : starts[s.name] + prod(s.shape)].view(s.shape).clone() for s in specs}


def find_newest_checkpoint(path: Path, island: str | None = None) -> SavedCheckpoint:
    """The checkpoint at `path`, or the complete one with the latest round below it. Raises InputError."""
    checkpoints: list[SavedCheckpoint] = []
    problems: list[str] = []
    for folder in find_checkpoint_folders(path, island):
        whole, damaged = disk.list_published(folder)
        checkpoints += [each for each in whole if folder != path.parent or each.path == path]
        problems += damaged
    for checkpoint in sorted(checkpoints, key=lambda c: parse_facts(c.facts.get("outer")).position.round, reverse=True):
        problem = disk.find_damage(checkpoint, checkpoint.manifest.files)
        if problem is None:
            return checkpoint
        problems.append(problem)
    if problems:
        raise InputError(problems[-1])
    raise InputError(
        f"{path} holds no checkpoint: looked in {path / (island or '<island>') / FOLDER} (an exported model has a "
        "config.json); islands save every island.checkpoint.every_rounds rounds and at the end of the run, but not "
        "with --in-process"
    )


def find_checkpoint_folders(path: Path, island: str | None) -> list[Path]:
    """Folders that may hold checkpoints, where `path` is the folder of a run, of an island, or of a checkpoint."""
    if disk.PUBLISHED_NAME.fullmatch(path.name):
        return [path.parent]
    if (path / FOLDER).is_dir():
        return [path / FOLDER]
    return sorted(path.glob(f"{island or '*'}/{FOLDER}"), key=lambda folder: natural_key(folder.parent.name))


def find_run_folder(path: Path) -> Path:
    """The folder of the run that contains `path`, or `path` itself."""
    if disk.PUBLISHED_NAME.fullmatch(path.name):
        return path.parent.parent.parent
    return path.parent if (path / FOLDER).is_dir() else path
