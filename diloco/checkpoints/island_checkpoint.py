"""Checkpoints of an island: all that it needs to go on as if it had never stopped.

    RUN_DIR/ISLAND/checkpoints/step-00000120/   params, optimizer, global params, momentum,
                                                residuals; facts as JSON

The next data and the learning rate follow from the round and the steps made in it. Nothing draws
from torch's random generators, so their state is not saved.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path

import torch

from diloco.checkpoints.facts import IslandFacts, parse_island_facts
from diloco.checkpoints.mirror import Mirror
from diloco.checkpoints.signing import island_signer
from diloco.config.overrides import differing_keys
from diloco.config.schema import IslandConfig, RunConfig
from diloco.runtime.progress import ResumedState, ResumePoint
from inner.checkpoint.folder import SavedCheckpoint
from inner.checkpoint.manifest import Signer
from inner.checkpoint.save_load import Checkpoints
from inner.checkpoint.tensor_reader import CheckpointFailed
from inner.data.mixture import READING_ORDER
from inner.errors import InputError
from inner.files import home_path
from inner.optim.loss_scale import LossScale
from inner.threads import Worker
from inner.trainer import Trainer
from outer.loop import OuterLoop
from outer.state.earlier import EarlierState

log = logging.getLogger(__name__)

LEAST_KEPT = 2
"""The newest checkpoint is proved good only by a finite loss after it, so one more is kept."""
CLOSE_SECONDS = 600.0
"""Longest wait at the end for a checkpoint that is still being written."""


@dataclass(frozen=True)
class CheckpointFolder:
    """Where an island keeps its checkpoints."""

    path: Path
    keep: int
    """Number of checkpoints to keep."""
    signer: Signer


class IslandCheckpoints:
    """One rank's side of its island's checkpoints.

    All ranks call each method together, at the same step.
    """

    def __init__(
        self, where: CheckpointFolder, run: RunConfig, trainer: Trainer, outer: OuterLoop
    ) -> None:
        self._files = Checkpoints(where.path, where.keep, signer=where.signer)
        self._where = where
        self._mirror: Mirror | None = None
        """Set on the leader, if the config asks for a mirror."""
        self._pushes: Worker | None = None
        """The thread that copies checkpoints to the mirror, if there is one."""
        self._offered: SavedCheckpoint | None = None
        """The checkpoint whose state `find_earlier` returned last."""
        self._resume_step: int | None = None
        """Inner step of the checkpoint to resume from; None means the newest."""
        self._run = run
        self._trainer = trainer
        self._outer = outer

    def mirror_to(self, url: str, *, may_pull: bool) -> None:
        """Mirror later checkpoints to this URL.

        With `may_pull`, first fetch the newest checkpoint of the URL if no local one is as new.
        Raises InputError if the URL cannot be used.
        """

        def begin() -> None:
            mirror = Mirror(url, self._where.keep, self._where.signer)
            if may_pull and (name := mirror.pull(self._where.path)):
                log.warning(
                    "%s was copied from %s, because this island's folder had no checkpoint as new",
                    name,
                    url,
                )
            self._mirror = mirror
            self._pushes = Worker("mirror")

        self._files.run_on_first_rank(begin)

    def save(self, point: ResumePoint, tokens: int) -> str | None:
        """Start to write a checkpoint in the background.

        Return the problem of this or the last save, or None. No round may be in flight.
        """
        tensors, facts = self._outer.save()
        run = self._run.model_dump(mode="json")
        specs = [*self._trainer.params.specs, *self._trainer.buffer_specs]
        params = [(spec.name, list(spec.shape)) for spec in specs]
        trainer = self._trainer
        scale = None if trainer.loss_scale is None else astuple(trainer.loss_scale)
        saved = IslandFacts(
            facts, point, tokens, run, params, READING_ORDER, trainer.spikes.losses, scale
        )
        try:
            self._files.save(self._trainer, asdict(saved), tensors)
        except (InputError, CheckpointFailed, TimeoutError) as error:
            return str(error)
        self._files.when_written(self._copy)
        return None

    def find_steps(self) -> set[int]:
        """Return the inner steps for which there is a complete checkpoint."""
        return self._files.find_steps()

    def reject_since(self, inner_step: int) -> list[str]:
        """Make `resume` skip the checkpoints of this inner step and later ones. Return their
        names.
        """
        return self._files.reject_since(inner_step)

    def find_earlier(self) -> EarlierState | None:
        """Return the global state of the newest checkpoint that is complete and not rejected.

        None if none is. Nothing else is loaded. Raises InputError if the checkpoint does not fit
        the run.
        """
        try:
            self._offered = self._files.newest()
        except InputError:
            return None  # All checkpoints are damaged or rejected.
        if self._offered is None:
            return None
        tensors = self._files.load_extra(self._offered, self._outer.allocate)
        return self._outer.read_earlier(tensors, parse_island_facts(self._offered).outer)

    def reload_trainer(self) -> None:
        """Load local params and optimizer from the checkpoint that `find_earlier` returned last.

        Raises InputError if the checkpoint does not fit the run.
        """
        assert self._offered is not None, "find_earlier must return a state before it is reloaded"
        self._files.load(self._trainer, self._offered)
        self._set_watches(parse_island_facts(self._offered))

    def resume_at(self, inner_step: int) -> None:
        """Make `resume` load the checkpoint of this inner step instead of the newest one."""
        self._resume_step = inner_step

    def resume(self) -> ResumedState | None:
        """Load the newest complete checkpoint, and return what it holds; None if there is none.

        Raises InputError if it does not fit the run.
        """
        found = (
            self._files.newest() if self._resume_step is None else self._files.at(self._resume_step)
        )
        if found is None:
            return None
        facts = parse_island_facts(found)
        tensors = dict[str, torch.Tensor]()

        def allocate(names: Collection[str]) -> Mapping[str, torch.Tensor]:
            tensors.update(self._outer.allocate(names))
            return tensors

        self._files.load(self._trainer, found, allocate)
        self._outer.restore(tensors, facts.outer)
        self._set_watches(facts)
        return ResumedState(
            inner_step=found.inner_step,
            round=self._outer.position.round,
            digest=self._outer.digest,
            point=facts.place,
            tokens=facts.tokens,
            changed=find_changes(self._run, facts),
        )

    def _set_watches(self, facts: IslandFacts) -> None:
        """Continue what the trainer remembers of earlier steps beside its tensors."""
        self._trainer.spikes.losses = facts.losses
        if self._trainer.loss_scale is not None and facts.loss_scale is not None:
            self._trainer.loss_scale = LossScale(*facts.loss_scale)

    def _copy(self) -> None:
        """Start to mirror the checkpoint just written.

        A slow copy delays later copies, but no save.
        """
        if self._mirror is not None and self._pushes is not None:
            self._pushes.submit(partial(push, self._mirror, self._where.path))

    def wait(self) -> None:
        """Wait until the checkpoint in progress is written and mirrored. Failures are logged."""
        try:
            self._files.wait(CLOSE_SECONDS)
        except (CheckpointFailed, TimeoutError) as error:
            log.error("the last checkpoint was not saved: %s", error)
        if self._mirror is not None:
            push(self._mirror, self._where.path)

    def close(self) -> None:
        """Wait as `wait` does, then release the folder."""
        self.wait()
        if self._pushes is not None:
            self._pushes.close()
        self._files.close()


@contextmanager
def open_checkpoints(
    run: RunConfig, island: IslandConfig, folder: Path, trainer: Trainer, outer: OuterLoop
) -> Iterator[IslandCheckpoints | None]:
    """Open the checkpoints of the island with this folder; yield None if its config asks for none.

    Every rank must enter this context.
    """
    settings = island.checkpoint
    if settings.every_rounds is None:
        yield None
        return
    where = folder / "checkpoints"
    if settings.folder:
        where = home_path(settings.folder, "island.checkpoint.folder") / run.name / island.label
    kept = CheckpointFolder(where, max(settings.keep, LEAST_KEPT), island_signer(island))
    checkpoints = IslandCheckpoints(kept, run, trainer, outer)
    try:
        if settings.mirror is not None:
            url = f"{settings.mirror.rstrip('/')}/{run.name}/{island.label}"
            checkpoints.mirror_to(url, may_pull=settings.resume == "auto")
        yield checkpoints
    finally:
        checkpoints.close()


def push(mirror: Mirror, folder: Path) -> None:
    """Mirror the newest checkpoint. A failure is logged and training goes on."""
    try:
        mirror.push(folder)
    except InputError as error:
        log.error("%s; training goes on", error)


def find_changes(run: RunConfig, facts: IslandFacts) -> list[str]:
    """Return one line per key that differs between the run's config and the saved one.

    Another version of the reading order adds a line.
    """
    order = []
    if facts.reading_order != READING_ORDER:
        order = [
            "the reading order is of another version: text of this epoch may be read twice, or not "
            "at all"
        ]
    try:
        return differing_keys(run, RunConfig(**facts.run)) + order
    except ValueError as error:
        return [f"the saved config is of another version: {' '.join(str(error).split())}", *order]
