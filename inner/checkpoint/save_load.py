"""Checkpoints of an island's training state: saved in the background, published atomically,
loadable on any mesh.

Each rank writes its own shards, under names that do not depend on the mesh;
torch.distributed.checkpoint plans who writes and reads what. A checkpoint may come from somebody
else: nothing in it is run (index.py, tensor_reader.py), and manifests may be signed.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from inner.checkpoint import folder as disk
from inner.checkpoint import state
from inner.checkpoint.collective_errors import run_on_all_ranks, run_on_first_rank
from inner.checkpoint.folder import UNSIGNED, SavedCheckpoint
from inner.checkpoint.index import read_index
from inner.checkpoint.manifest import Manifest, Signer
from inner.checkpoint.tensor_reader import CheckpointFailed, describe, read_tensors
from inner.checkpoint.tensor_writer import write_tensors
from inner.errors import InputError
from inner.params import copy_to_host
from inner.threads import Worker

log = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]
AllocateExtra = Callable[[Collection[str]], Tensors]


class TrainingState(Protocol):
    """The attributes of a Trainer that are saved and loaded."""

    inner_step: int

    @property
    def model_parts(self) -> Sequence[nn.Module]: ...

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...


class Checkpoints:
    """The checkpoints of one island, in a folder that all ranks share. Each rank builds one object.

    Every method is collective: all ranks call the methods in the same order, and a call returns or
    raises on all ranks.
    """

    def __init__(
        self, folder: Path, keep: int, timeout_seconds: float = 1800.0, *, signer: Signer = UNSIGNED
    ) -> None:
        """Lock `folder` until close(), and keep the newest `keep` checkpoints. Raises InputError if
        the folder cannot be locked.

        No rank waits longer than `timeout_seconds` for other ranks or for an earlier save. `signer`
        signs the manifests and decides which checkpoints are read.
        """
        assert keep >= 1, f"keep {keep} would delete what was just saved"
        self._folder = folder
        self._keep = keep
        self._signer = signer
        self._timeout_seconds = timeout_seconds
        # A separate group, because the writing thread communicates while the training thread uses
        # the other groups.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._writing: Future[None] | None = None
        self._lock: TextIO | None = None
        run_on_first_rank(group, self._lock_folder)
        # Start the thread now: at the time of a save there may be no memory for a new thread.
        self._writer = Worker("checkpoint")

    def save(
        self,
        trainer: TrainingState,
        facts: dict[str, Any],
        extra: Tensors | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Copy the state to CPU memory and write the copy in the background. With `wait`, return
        once it is published.

        `facts` are JSON values; only those of rank 0 are saved. `extra` are plain tensors of this
        rank, under names that no other rank and no parameter uses. An earlier save is waited for
        first. Raises CheckpointFailed if the earlier save failed, and InputError if this save
        cannot be started. Call wait() before the process ends.
        """
        self.wait(self._timeout_seconds)
        live = state.live_tensors(trainer.model_parts, trainer.optimizers)
        live |= {name: [tensor] for name, tensor in (extra or {}).items()}
        sizes = _merge(run_on_all_ranks(self._group, lambda: state.num_bytes(live)))
        own_kinds = run_on_all_ranks(
            self._group, lambda: state.optimizer_names(trainer.model_parts, trainer.optimizers)
        )
        kinds = _merge(own_kinds)
        manifest = Manifest(trainer.inner_step, facts, kinds)

        def begin() -> Path:
            json.dumps(facts, allow_nan=False)
            return disk.create_partial(
                self._folder, manifest.inner_step, sum(sizes.values()), len(sizes)
            )

        partial = run_on_first_rank(self._group, begin)
        copies = dict(
            zip(live, copy_to_host([tensor for tensor, *_ in live.values()]), strict=True)
        )
        device = next(param.device for _, param in state.named_params(trainer.model_parts))
        self._writing = self._writer.submit(
            lambda: _on_device(lambda: self._write(copies, partial, manifest), device)
        )
        if wait:
            self.wait(self._timeout_seconds)

    def wait(self, timeout_seconds: float) -> None:
        """Wait until no save is in progress. Raises TimeoutError, or CheckpointFailed if the save
        failed, once per failure.
        """
        if self._writing is None:
            return
        finished, _ = wait([self._writing], timeout_seconds)
        if not finished:
            raise TimeoutError(
                f"{self._folder}: a checkpoint is still being written after {timeout_seconds} s"
            )
        writing = self._writing
        self._writing = None
        writing.result()

    def when_written(self, callback: Callable[[], None]) -> None:
        """Call `callback` on another thread once the save in progress is published; never if that
        save fails.
        """
        assert self._writing is not None, "nothing is being written"
        self._writing.add_done_callback(lambda done: None if done.exception() else callback())

    def newest(self) -> SavedCheckpoint | None:
        """Return the last saved checkpoint without a damaged file, or None if the folder has no
        checkpoints.

        Damaged and rejected checkpoints are skipped with a warning. Raises InputError if all
        checkpoints are skipped.
        """
        intact, problems = self._list_published()
        for problem in problems:
            self._warn(problem)
        for checkpoint in intact:
            problem = self._find_rejection(checkpoint) or self._find_damage(checkpoint)
            if problem is None:
                return checkpoint
            self._warn(problem)
            problems.append(problem)
        if problems:
            raise InputError(
                f"{self._folder}: none of the {len(problems)} checkpoints is whole; "
                f"{problems[-1]}; restore one, or "
                "move them away to train from the beginning"
            )
        return None

    def find_steps(self) -> set[int]:
        """Return the inner steps that have a checkpoint without a damaged file."""
        intact, _ = self._list_published()
        return {
            checkpoint.inner_step for checkpoint in intact if self._find_damage(checkpoint) is None
        }

    def at(self, inner_step: int) -> SavedCheckpoint:
        """Return a step's last saved checkpoint. Raises InputError if it is missing or damaged."""
        intact, problems = self._list_published()
        there = [checkpoint for checkpoint in intact if checkpoint.inner_step == inner_step]
        if not there:
            steps = ", ".join(str(checkpoint.inner_step) for checkpoint in intact) or "none"
            damaged = "".join(f"; {problem}" for problem in problems)
            raise InputError(
                f"{self._folder}: no checkpoint of step {inner_step}; there are: {steps}{damaged}"
            )
        problem = self._find_damage(there[0])
        if problem is not None:
            raise InputError(f"{problem}; restore it, or load another step's checkpoint")
        return there[0]

    def load(
        self,
        trainer: TrainingState,
        checkpoint: SavedCheckpoint,
        allocate_extra: AllocateExtra = lambda names: {},
    ) -> dict[str, Any]:
        """Load parameters, optimizer states and inner step into the trainer, on any mesh, and
        return the saved facts.

        `checkpoint` comes from newest() or at(), which checked its files. `allocate_extra` gets the
        names of all saved tensors and returns memory for the `extra` tensors that this rank loads.
        Raises InputError, with nothing changed, if the checkpoint belongs to another model or
        optimizer or its index is refused. Also raises InputError for a refused tensor; the trainer
        may then be changed in part.
        """
        self.wait(self._timeout_seconds)
        # One rank reads the index, so that all ranks have the same.
        index = run_on_first_rank(self._group, lambda: read_index(checkpoint))
        self._check_fit(trainer, checkpoint, index.tensors)
        state.make_states(trainer.model_parts, trainer.optimizers, index.tensors)
        live = state.live_tensors(trainer.model_parts, trainer.optimizers)
        tensors = {name: copies[0] for name, copies in live.items()} | dict(
            allocate_extra(index.tensors.keys())
        )
        read_tensors(tensors, checkpoint.path, index, self._group)
        for first, *others in live.values():
            for other in others:
                other.copy_(first)
        trainer.inner_step = checkpoint.inner_step
        return checkpoint.facts

    def load_extra(self, checkpoint: SavedCheckpoint, allocate: AllocateExtra) -> Tensors:
        """Load only saved `extra` tensors, and return them. `allocate` gets the names of all saved
        tensors and returns memory for the tensors to load. Raises InputError for a refused index or
        tensor.
        """
        self.wait(self._timeout_seconds)
        index = run_on_first_rank(self._group, lambda: read_index(checkpoint))
        tensors = dict(allocate(index.tensors.keys()))
        read_tensors(tensors, checkpoint.path, index, self._group)
        return tensors

    def reject_since(self, inner_step: int) -> list[str]:
        """Reject checkpoints of this inner step and later, so that nobody resumes from them.
        Returns their names.
        """
        self.wait(self._timeout_seconds)
        return run_on_first_rank(
            self._group, lambda: disk.reject_since(self._folder, inner_step, self._signer)
        )

    def run_on_first_rank(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0, which holds the folder's lock. If `work` raises, every rank raises
        the same error.
        """
        run_on_first_rank(self._group, work)

    def close(self) -> None:
        """Wait for a save in progress and unlock the folder. No other method may be called
        afterwards.
        """
        try:
            self.wait(self._timeout_seconds)
        finally:
            self._writer.close()
            if self._lock is not None:
                self._lock.close()
            dist.destroy_process_group(self._group)

    def _lock_folder(self) -> None:
        self._lock = disk.lock_folder(self._folder)

    def _write(self, copies: dict[str, Tensor], partial: Path, manifest: Manifest) -> None:
        """Write and publish a checkpoint in the background, on all ranks. Raises
        CheckpointFailed.
        """
        try:
            files = write_tensors(copies, partial, self._group)
            run_on_first_rank(
                self._group,
                lambda: disk.publish(partial, replace(manifest, files=files), self._signer),
            )
            run_on_first_rank(
                self._group, lambda: disk.prune(self._folder, self._keep, self._signer)
            )
        # Keep every error for wait(), which raises it in the caller's thread.
        except Exception as error:
            raise CheckpointFailed(
                f"{self._folder}: step {manifest.inner_step} was not saved: {describe(error)}; "
                f"{disk.free_space(self._folder)}; earlier checkpoints are as they were"
            ) from error

    def _list_published(self) -> tuple[list[SavedCheckpoint], list[str]]:
        self.wait(self._timeout_seconds)
        return run_on_first_rank(
            self._group, lambda: disk.list_published(self._folder, self._signer)
        )

    def _find_damage(self, checkpoint: SavedCheckpoint) -> str | None:
        """Return a message about a damaged file, or None. Each file is hashed by one rank."""
        mine = sorted(checkpoint.manifest.files)[
            dist.get_rank(self._group) :: dist.get_world_size(self._group)
        ]
        return next(
            filter(None, run_on_all_ranks(self._group, lambda: disk.find_damage(checkpoint, mine))),
            None,
        )

    def _find_rejection(self, checkpoint: SavedCheckpoint) -> str | None:
        """Return a message if it was rejected, or None. Only rank 0 looks, so that all ranks
        agree.
        """
        is_rejected = run_on_first_rank(self._group, lambda: checkpoint.is_rejected)
        return f"{checkpoint.path}: rejected: no loss was finite after it" if is_rejected else None

    def _check_fit(
        self, trainer: TrainingState, checkpoint: SavedCheckpoint, saved: state.Saved
    ) -> None:
        """Raise InputError if the checkpoint's parameters and optimizers differ from the
        trainer's.
        """
        stages = trainer.model_parts
        optimizers = trainer.optimizers
        kinds = checkpoint.manifest.optimizers
        names = run_on_all_ranks(
            self._group, lambda: [name for name, _ in state.named_params(stages)]
        )
        extra = sorted(state.saved_params(saved).difference(*names))
        problems = run_on_all_ranks(
            self._group, lambda: state.find_mismatch(stages, optimizers, saved, kinds)
        )
        problems += [
            f"the checkpoint has the parameter {name}, the model does not" for name in extra
        ]
        if problem := next(filter(None, problems), None):
            raise InputError(
                f"{checkpoint.path}: {problem}; load it with the model and optimizer that it was "
                "saved with, or start another run in another folder"
            )

    @property
    def _is_first(self) -> bool:
        return dist.get_rank(self._group) == 0

    def _warn(self, problem: str) -> None:
        if self._is_first:
            log.warning("checkpoint passed over: %s", problem)


def _on_device(work: Callable[[], None], device: torch.device) -> None:
    """Run `work` with `device` as this thread's current device."""
    # A new thread's current device is GPU 0, and there torch's writer would open a context for
    # every rank.
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    work()


def _merge(dicts: Sequence[dict]) -> dict:
    return {key: value for one in dicts for key, value in one.items()}
