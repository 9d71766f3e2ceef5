"""The global params of a run as its islands have saved them: read by one process, whole, without training anything."""

import warnings
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from diloco.config import RunConfig
from diloco.planning.specs import Spec
from diloco.runfiles import natural_key
from inner import checkpoint_folder as disk
from inner.checkpoint_folder import Found
from inner.errors import InputError
from outer.coding import coding_of
from outer.fragments import groups_of, with_moments
from outer.saved import PARAMS, read_facts
from outer.space import Space

FOLDER = "checkpoints"


def read_global_params(run_dir: Path, island: str | None = None) -> tuple[RunConfig, dict[str, torch.Tensor]]:
    """The run's config and its global params, fp32 by full name: of the island that has saved the latest round.

    `run_dir` may be a run's folder, an island's, or one checkpoint. InputError: there is none, or all are damaged.
    """
    found = newest_checkpoint(run_dir, island)
    try:
        run = RunConfig(**found.facts["run"])
        specs = [Spec(name, tuple(shape)) for name, shape in found.facts["params"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{found.path}: not a checkpoint of an island of this version: {error!r}") from None
    coding = coding_of(run.outer)
    groups = groups_of(specs, run.outer, splits_fine=coding.splits_fine)
    space = Space(with_moments(specs, run.outer), run.outer.part_elements, coding.block_elements, groups)
    flat = torch.empty(space.num_elements)
    parts = {f"{PARAMS}{p.index}": flat[p.start : p.stop] for p in space.parts if not p.is_moment}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(parts, storage_reader=dcp.FileSystemReader(found.path), no_dist=True)
    starts = space.offsets
    return run, {s.name: flat[starts[s.name] : starts[s.name] + prod(s.shape)].view(s.shape).clone() for s in specs}


def newest_checkpoint(path: Path, island: str | None = None) -> Found:
    """The checkpoint `path`, or the whole one with the latest round below it. Raises InputError."""
    found: list[Found] = []
    problems: list[str] = []
    for folder in checkpoint_folders(path, island):
        whole, damaged = disk.published(folder)
        found += [one for one in whole if folder != path.parent or one.path == path]
        problems += damaged
    for one in sorted(found, key=round_of, reverse=True):
        problem = disk.find_damage(one, one.contents.files)
        if problem is None:
            return one
        problems.append(problem)
    raise InputError(problems[-1] if problems else nothing_in(path, island))


def checkpoint_folders(path: Path, island: str | None) -> list[Path]:
    """Where checkpoints may lie: `path` is a run's folder, an island's, or a checkpoint."""
    if disk.PUBLISHED_NAME.fullmatch(path.name):
        return [path.parent]
    if (path / FOLDER).is_dir():
        return [path / FOLDER]
    return sorted(path.glob(f"{island or '*'}/{FOLDER}"), key=lambda folder: natural_key(folder.parent.name))


def run_folder(path: Path) -> Path:
    """The run's folder that `path` is, or lies in."""
    if disk.PUBLISHED_NAME.fullmatch(path.name):
        return path.parent.parent.parent
    return path.parent if (path / FOLDER).is_dir() else path


def round_of(found: Found) -> int:
    """Rounds committed when it was saved."""
    return read_facts(found.facts.get("outer")).position.round


def nothing_in(path: Path, island: str | None) -> str:
    """Why there is no checkpoint."""
    where = path / (island or "<island>") / FOLDER
    return (
        f"{path} holds no checkpoint: looked in {where} (an exported model has a config.json); islands save every "
        "island.checkpoint.every_rounds rounds and at the end of the run, but not with --in-process"
    )
