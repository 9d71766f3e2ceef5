"""Read the global params of a run, unsharded, from the checkpoints of its islands, in one
process.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from pydantic import ValidationError

from diloco.checkpoints.facts import parse_island_facts
from diloco.checkpoints.signing import RunKeySigner
from diloco.config.schema import RunConfig
from diloco.records.run_folder import natural_key
from inner.checkpoint import folder as disk
from inner.checkpoint.folder import SavedCheckpoint
from inner.checkpoint.index import Index, read_index
from inner.checkpoint.manifest import Signer
from inner.checkpoint.tensor_reader import CheckpointFailed, read_tensors
from inner.errors import InputError
from inner.param_spec import ParamSpec
from outer.codecs.choice import build_space
from outer.errors import InputError as OuterInputError
from outer.rounds.checkpoint import PARAMS, parse_facts
from outer.space.fragments import plain_name

FOLDER = "checkpoints"
NO_KEY = RunKeySigner()


def read_global_params(
    run_dir: Path, island: str | None = None, signer: Signer = NO_KEY
) -> tuple[RunConfig, dict[str, torch.Tensor]]:
    """Return the run's config and global params (fp32, by full name) of the latest round, with the
    averaged buffers, such as the biases of routers.

    `run_dir` may be the folder of a run, of an island, or of one checkpoint. Raises InputError if
    there is no checkpoint, or if all are damaged or refused by `signer`.
    """
    checkpoint = find_newest_checkpoint(run_dir, island, signer)
    facts = parse_island_facts(checkpoint)
    index = read_index(checkpoint)
    try:
        run = RunConfig(**facts.run)
    except (TypeError, ValidationError) as error:
        raise InputError(
            f"{checkpoint.path}: not a checkpoint of an island of this version: {error!r}"
        ) from None
    specs = [ParamSpec(name, tuple(shape)) for name, shape in facts.params]
    flat, parts = _allocate(specs, run, index, checkpoint.path)
    try:
        read_tensors(parts, checkpoint.path, index, None)
    except CheckpointFailed as error:
        raise InputError(str(error)) from error
    starts = build_space(specs, run.outer).offsets
    flats = {spec: flat[starts[spec.name] : starts[spec.name] + prod(spec.shape)] for spec in specs}
    return run, {
        plain_name(spec.name): values.view(spec.shape).clone() for spec, values in flats.items()
    }


def _allocate(
    specs: Sequence[ParamSpec], run: RunConfig, index: Index, path: Path
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a flat vector for all parameters, and its parts by their names in the checkpoint.

    Memory is allocated only for parameters that the files hold, whatever the facts claim. Raises
    InputError if the files lack some.
    """
    saved = sum(
        prod(tensor.size) for name, tensor in index.tensors.items() if name.startswith(PARAMS)
    )
    if (needed := sum(prod(spec.shape) for spec in specs)) > saved:
        raise InputError(
            f"{path}: its parameters have {needed} elements, but its files hold only {saved}; use "
            "another checkpoint"
        )
    space = build_space(specs, run.outer)
    flat = torch.zeros(space.num_elements)
    parts = {
        f"{PARAMS}{p.index}": flat[p.start : p.stop]
        for p in space.parts
        if p.kind in ("params", "buffer")
    }
    for name, part in parts.items():
        if name not in index.tensors or index.tensors[name].size != part.shape:
            raise InputError(
                f"{path}: it has no tensor {name} of {part.numel()} elements; use another "
                "checkpoint"
            )
    return flat, parts


def find_newest_checkpoint(
    path: Path, island: str | None = None, signer: Signer = NO_KEY
) -> SavedCheckpoint:
    """Return the checkpoint at `path`, or the complete one below it with the latest round.

    Raises InputError if there is none.
    """
    by_round: list[tuple[int, SavedCheckpoint]] = []
    problems: list[str] = []
    for folder in find_checkpoint_folders(path, island):
        whole, damaged = disk.list_published(folder, signer)
        problems += damaged
        for checkpoint in whole:
            if folder != path.parent or checkpoint.path == path:
                try:
                    by_round.append(
                        (
                            parse_facts(parse_island_facts(checkpoint).outer).position.round,
                            checkpoint,
                        )
                    )
                except (InputError, OuterInputError) as error:
                    problems.append(f"{checkpoint.path}: {error}")
    for _, checkpoint in sorted(by_round, key=lambda pair: pair[0], reverse=True):
        problem = disk.find_damage(checkpoint, checkpoint.manifest.files)
        if problem is None:
            return checkpoint
        problems.append(problem)
    if problems:
        raise InputError(problems[-1])
    raise InputError(
        f"{path} holds no checkpoint: looked in {path / (island or '<island>') / FOLDER} (an "
        "exported model has a config.json); islands save every island.checkpoint.every_rounds "
        "rounds and at the end of the run, but not with --in-process"
    )


def find_checkpoint_folders(path: Path, island: str | None) -> list[Path]:
    """Return the folders that may hold checkpoints.

    `path`: a run's, an island's or a checkpoint's folder.
    """
    if disk.PUBLISHED_NAME.fullmatch(path.name):
        return [path.parent]
    if (path / FOLDER).is_dir():
        return [path / FOLDER]
    return sorted(
        path.glob(f"{island or '*'}/{FOLDER}"), key=lambda folder: natural_key(folder.parent.name)
    )


def find_run_folder(path: Path) -> Path:
    """Return the folder of the run that contains `path`, or `path` itself."""
    if disk.PUBLISHED_NAME.fullmatch(path.name):
        return path.parent.parent.parent
    return path.parent if (path / FOLDER).is_dir() else path
