"""An island's training state on disk: saved while training goes on, published whole or not at all, for any mesh.

Tensors are written by torch.distributed.checkpoint, each rank its own shards, under names that no mesh changes. Its
index of them is a pickle: load only checkpoints from your own disk. All that is ours is JSON.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TextIO

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from inner import checkpoint_folder as disk
from inner import checkpoint_state as state
from inner.checkpoint_folder import Contents, Found
from inner.errors import InputError
from inner.together import on_first, together

log = logging.getLogger(__name__)

NOTHING: Mapping[str, Tensor] = {}


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read; the older ones are as they were."""


def no_room(saved: Collection[str]) -> Mapping[str, Tensor]:
    """For checkpoints of a trainer alone."""
    return NOTHING


class TrainingState(Protocol):
    """What is saved: a Trainer, or anything with these."""

    inner_step: int

    @property
    def parts(self) -> Sequence[nn.Module]: ...

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...


class Checkpoints:
    """The checkpoints of one run and island, in a folder that all its ranks see. Every rank must build one.

    Every method is collective, called by all ranks in one order, and ends alike on all: it returns, or all raise.
    """

    def __init__(self, folder: Path, keep: int, timeout_seconds: float = 1800.0) -> None:
        """Holds `folder` until close(); all but the newest `keep` are deleted. Raises InputError if it cannot.

        No rank waits longer than `timeout_seconds` for the others, or for an earlier save.
        """
        assert keep >= 1, f"keep {keep} would delete what was just saved"
        self._folder = folder
        self._keep = keep
        self._timeout_seconds = timeout_seconds
        # Its own: the writing thread talks while the training thread uses the others.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._writing: Future[None] | None = None
        self._lock: TextIO | None = None
        on_first(group, self._hold)

    def save(
        self,
        trainer: TrainingState,
        facts: dict[str, Any],
        more: Mapping[str, Tensor] = NOTHING,
        *,
        wait: bool = False,
    ) -> None:
        """Copies the state to CPU memory and returns; with `wait`, only when it is published. Raises InputError.

        The copy is written in the background, so training may go on at once; call wait() before the process ends.
        `facts`: JSON, of which rank 0's are kept. `more`: plain tensors of this rank, under names that no other rank
        and no parameter has. Waits first for an earlier save, and raises CheckpointFailed if that one failed.
        """
        self.wait(self._timeout_seconds)
        live = state.live_tensors(trainer.parts, trainer.optimizers) | {name: [more[name]] for name in more}
        sizes = _merged(together(self._group, lambda: state.num_bytes(live)))
        steppers = _merged(together(self._group, lambda: state.optimizer_names(trainer.parts, trainer.optimizers)))
        contents = Contents(trainer.inner_step, facts, steppers)

        def begin() -> Path:
            json.dumps(facts, allow_nan=False)
            return disk.start(self._folder, contents.inner_step, sum(sizes.values()), len(sizes))

        partial = on_first(self._group, begin)
        staged = state.copy_to_cpu(live)
        self._writing = _in_background(lambda: self._write(staged, partial, contents))
        if wait:
            self.wait(self._timeout_seconds)

    def wait(self, timeout_seconds: float) -> None:
        """Returns once nothing is being written. Raises CheckpointFailed once if that failed, or TimeoutError."""
        if self._writing is None:
            return
        finished, _ = wait([self._writing], timeout_seconds)
        if not finished:
            raise TimeoutError(f"{self._folder}: a checkpoint is still being written after {timeout_seconds} s")
        writing, self._writing = self._writing, None
        writing.result()

    def when_written(self, told: Callable[[], None]) -> None:
        """Call `told`, on another thread, once what is being written is published; never if that fails."""
        assert self._writing is not None, "nothing is being written"
        self._writing.add_done_callback(lambda done: None if done.exception() else told())

    def newest(self) -> Found | None:
        """The last saved checkpoint whose every file is as it was written; None if none was ever saved.

        Damaged ones are passed over with a warning. Raises InputError if there are only damaged ones.
        """
        whole, problems = self._published()
        for problem in problems:
            self._warn(problem)
        for found in whole:
            problem = self._damage(found)
            if problem is None:
                return found
            self._warn(problem)
            problems.append(problem)
        if problems:
            raise InputError(
                f"{self._folder}: none of the {len(problems)} checkpoints is whole; {problems[-1]}; restore one, or "
                "move them away to train from the beginning"
            )
        return None

    def at(self, inner_step: int) -> Found:
        """The checkpoint of a step, the last saved if there are several. Raises InputError if absent or damaged."""
        whole, problems = self._published()
        there = [found for found in whole if found.inner_step == inner_step]
        if not there:
            steps = ", ".join(str(found.inner_step) for found in whole) or "none"
            damaged = "".join(f"; {problem}" for problem in problems)
            raise InputError(f"{self._folder}: no checkpoint of step {inner_step}; there are: {steps}{damaged}")
        problem = self._damage(there[0])
        if problem is not None:
            raise InputError(f"{problem}; restore it, or load another step's checkpoint")
        return there[0]

    def load(
        self, trainer: TrainingState, found: Found, room: Callable[[Collection[str]], Mapping[str, Tensor]] = no_room
    ) -> dict[str, Any]:
        """Sets parameters, optimizer states and inner step to the saved ones, on any mesh; the facts saved with them.

        `found` is of newest() or at(), which checked its files. `room`: from the names of all saved tensors, those of
        `more` that this rank wants, to be loaded into. Raises InputError, and has changed nothing, if the checkpoint is
        of another model or optimizer.
        """
        self.wait(self._timeout_seconds)
        saved: dict[str, Any] = dcp.FileSystemReader(found.path).read_metadata().state_dict_metadata
        self._check_fit(trainer, found, saved)
        state.make_states(trainer.parts, trainer.optimizers, saved)
        live = state.live_tensors(trainer.parts, trainer.optimizers)
        try:
            dcp.load(
                {name: copies[0] for name, copies in live.items()} | dict(room(saved.keys())),
                storage_reader=dcp.FileSystemReader(found.path),
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
                process_group=self._group,
            )
        except CheckpointException as error:
            raise CheckpointFailed(f"{found.path}: was not loaded: {_cause(error)}") from error
        for first, *others in live.values():
            for other in others:
                other.copy_(first)
        trainer.inner_step = found.inner_step
        return found.facts

    def on_first(self, work: Callable[[], None]) -> None:
        """Has rank 0 do something to the folder while no other process may; raises on all ranks what it raised."""
        on_first(self._group, work)

    def close(self) -> None:
        """Waits for a save that is being written and lets go of the folder. The last call."""
        try:
            self.wait(self._timeout_seconds)
        finally:
            if self._lock is not None:
                self._lock.close()
            dist.destroy_process_group(self._group)

    def _hold(self) -> None:
        self._lock = disk.lock(self._folder)

    def _write(self, staged: dict[str, Tensor], partial: Path, contents: Contents) -> None:
        """The background part of a save, on all ranks at once. Raises CheckpointFailed."""
        mine = [f"__{dist.get_rank(self._group)}_*.distcp"] + [".metadata"] * self._is_first
        try:
            dcp.save(
                staged,
                storage_writer=dcp.FileSystemWriter(partial, sync_files=True, overwrite=False),
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                process_group=self._group,
            )
            files = _merged(together(self._group, lambda: disk.measure(partial, mine)))
            on_first(self._group, lambda: disk.publish(partial, replace(contents, files=files)))
            on_first(self._group, lambda: disk.prune(self._folder, self._keep))
        # torch's is not an Exception; whatever it is, only wait() can raise it where someone hears of it.
        except (CheckpointException, Exception) as error:
            raise CheckpointFailed(
                f"{self._folder}: step {contents.inner_step} was not saved: {_cause(error)}; "
                f"{disk.room(self._folder)}; earlier checkpoints are as they were"
            ) from error

    def _published(self) -> tuple[list[Found], list[str]]:
        self.wait(self._timeout_seconds)
        return on_first(self._group, lambda: disk.published(self._folder))

    def _damage(self, found: Found) -> str | None:
        """What is wrong with the checkpoint's files, each hashed by one rank."""
        mine = sorted(found.contents.files)[dist.get_rank(self._group) :: dist.get_world_size(self._group)]
        return _first(together(self._group, lambda: disk.find_damage(found, mine)))

    def _check_fit(self, trainer: TrainingState, found: Found, saved: dict[str, TensorStorageMetadata]) -> None:
        """Raises InputError if the checkpoint's parameters and optimizers are not the trainer's."""
        parts, optimizers = trainer.parts, trainer.optimizers
        steppers = found.contents.optimizers
        known = together(self._group, lambda: state.param_names(parts))
        extra = sorted(state.saved_params(saved).difference(*known))
        problem = _first(together(self._group, lambda: state.find_mismatch(parts, optimizers, saved, steppers))) or (
            f"the checkpoint has the parameter {extra[0]}, the model has not" if extra else None
        )
        if problem:
            raise InputError(
                f"{found.path}: {problem}; load it with the model and optimizer it was saved with, or start "
                "another run in another folder"
            )

    @property
    def _is_first(self) -> bool:
        return dist.get_rank(self._group) == 0

    def _warn(self, problem: str) -> None:
        if self._is_first:
            log.warning("checkpoint passed over: %s", problem)


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Runs `work` on a thread that does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _cause(error: BaseException) -> str:
    """One line: what went wrong, and on which rank."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {first!r}"
    return " ".join([repr(error), *getattr(error, "__notes__", [])])


def _first(problems: Sequence[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def _merged(dicts: Sequence[dict]) -> dict:
    """Their union; ranks that share a name hold the same under it."""
    return {key: value for one in dicts for key, value in one.items()}
