"""Checkpoints of a run: all that an island needs to go on as if it had never stopped, in a folder of its own.

    RUN_DIR/ISLAND/checkpoints/step-00000120/   params, optimizer, global params, momentum, residuals; facts as JSON

What is read next and the learning rate follow from the round and the steps made in it. Nothing draws from torch's
random generators, so none are saved.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from diloco.config import IslandConfig, RunConfig, differing_keys
from diloco.mirror import Mirror
from diloco.progress import Place, Progress, Resumed
from inner.checkpoint import CheckpointFailed, Checkpoints
from inner.errors import InputError
from inner.trainer import Trainer
from outer.gossip_loop import GossipLoop
from outer.sync import OuterLoop

Outer = OuterLoop | GossipLoop
log = logging.getLogger(__name__)

CLOSE_SECONDS = 600.0
"""Longest wait for a checkpoint that is being written when the island ends."""


class RunCheckpoints:
    """One rank's part in its island's checkpoints. Every method is collective: all ranks call it at the same step."""

    def __init__(self, folder: Path, keep: int, run: RunConfig, trainer: Trainer, outer: Outer) -> None:
        self._files = Checkpoints(folder, keep)
        self._folder, self._keep = folder, keep
        self._mirror: Mirror | None = None
        """The leader's, if there is one."""
        self._run, self._trainer, self._outer = run, trainer, outer

    def mirror_to(self, url: str, *, may_pull: bool) -> None:
        """Copy what is saved from now on there, too; first the newest from there, if it `may_pull` and that is newer.

        Raises InputError when the URL cannot be used.
        """

        def begin() -> None:
            mirror = Mirror(url, self._keep)
            if may_pull and (name := mirror.pull(self._folder)):
                log.warning("%s was copied from %s: this island's folder had none as new", name, url)
            self._mirror = mirror

        self._files.on_first(begin)

    def save(self, place: Place, tokens: int) -> str | None:
        """Write the state in the background; why not, if it cannot be: training goes on.

        No round may be on its way. A failure of the save before is said, too.
        """
        tensors, facts = self._outer.saved()
        run = self._run.model_dump(mode="json")
        params = [(spec.name, list(spec.shape)) for spec in self._trainer.params.specs]
        try:
            facts = {"outer": facts, "place": asdict(place), "tokens": tokens, "run": run, "params": params}
            self._files.save(self._trainer, facts, tensors)
        except (InputError, CheckpointFailed, TimeoutError) as error:
            return str(error)
        self._files.when_written(self._copy)
        return None

    def resume(self) -> Resumed | None:
        """Go on from the newest whole checkpoint; None when there is none. Raises InputError when it does not fit."""
        found = self._files.newest()
        if found is None:
            return None
        tensors: dict[str, torch.Tensor] = {}

        def room(names: Collection[str]) -> Mapping[str, torch.Tensor]:
            tensors.update(self._outer.room(names))
            return tensors

        facts = self._files.load(self._trainer, found, room)
        self._outer.restore(tensors, facts["outer"])
        return Resumed(
            inner_step=found.inner_step,
            round=self._outer.position.round,
            digest=self._outer.digest,
            place=Place(facts["place"]["steps"], Progress(**facts["place"]["made"])),
            tokens=facts["tokens"],
            changed=changed_keys(self._run, facts["run"]),
        )

    def _copy(self) -> None:
        """Begin to copy what has been written. A slow copy holds up the next copy, which takes the newest; no save."""
        if self._mirror is not None:
            Thread(target=push, args=(self._mirror, self._folder), name="mirror", daemon=True).start()

    def wait(self) -> None:
        """Let what is being written come to its end. What has failed is logged."""
        try:
            self._files.wait(CLOSE_SECONDS)
        except (CheckpointFailed, TimeoutError) as error:
            log.error("the last checkpoint was not saved: %s", error)
        if self._mirror is not None:
            push(self._mirror, self._folder)

    def close(self) -> None:
        """Wait as above, and let go of the folder."""
        self.wait()
        self._files.close()


@contextmanager
def opened(
    run: RunConfig, island: IslandConfig, folder: Path, trainer: Trainer, outer: Outer
) -> Iterator[RunCheckpoints | None]:
    """Where the island whose folder this is saves; None when it does not. Every rank must enter it."""
    settings = island.checkpoint
    if settings.every_rounds is None:
        yield None
        return
    where = Path(settings.folder).expanduser() / run.name / island.island if settings.folder else folder / "checkpoints"
    checkpoints = RunCheckpoints(where, settings.keep, run, trainer, outer)
    try:
        if settings.mirror is not None:
            url = f"{settings.mirror.rstrip('/')}/{run.name}/{island.island}"
            checkpoints.mirror_to(url, may_pull=settings.resume == "auto")
        yield checkpoints
    finally:
        checkpoints.close()


def push(mirror: Mirror, folder: Path) -> None:
    """Copy the newest checkpoint; a failure is logged, and training goes on."""
    try:
        mirror.push(folder)
    except InputError as error:
        log.error("%s; training goes on", error)


def changed_keys(run: RunConfig, saved: dict[str, Any]) -> list[str]:
    """One line for each key of the run's config that differs from the saved one."""
    try:
        return differing_keys(run, RunConfig(**saved))
    except ValueError as error:
        return [f"the saved config is of another version: {' '.join(str(error).split())}"]
