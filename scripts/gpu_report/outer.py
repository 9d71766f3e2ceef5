"""Seconds for which the outer loop and checkpoints hold up training, on an island of one rank."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from inner.checkpoint.save_load import Checkpoints
from inner.model.sizes import PRESETS
from inner.trainer import Trainer
from outer.config import OuterConfig
from outer.space.digest import part_digest
from outer.state.replica import Replica
from scripts.gpu_report.place import Place, Row, guarded
from scripts.gpu_report.training import TINY, TrainingCase, one_rank, wait_for_device


def time_the_seam(place: Place) -> Iterator[Row]:
    case = TrainingCase(TINY, 32, 2) if place.is_tiny else TrainingCase(PRESETS["1b"], 2048, 1)
    with one_rank(place) as ranks:
        trainer = case.build(place.first)
        trainer.step(case.windows(0))
        size = 4 * sum(spec.matrix_shape[0] * spec.matrix_shape[1] for spec in trainer.params.specs)
        replica = Replica(OuterConfig(), trainer.params, ranks)

        def seconds(what: Callable[[], object]) -> Row:
            wait_for_device(place)
            started = time.perf_counter()
            what()
            wait_for_device(place)
            took = time.perf_counter() - started
            return {"seconds": took, "GB": size / 1e9, "s_per_GB": took / (size / 1e9)}

        yield from guarded("snapshot (pseudo-gradient)", lambda: seconds(replica.pseudo_grads))
        yield from guarded("land (overwrite local params)", lambda: seconds(replica.take_over))
        parts = replica.carried.parts.values()
        yield from guarded("digest of the params", lambda: seconds(lambda: [part_digest(part) for part in parts]))
        yield from guarded("checkpoint", lambda: time_checkpoint(place, trainer))


def time_checkpoint(place: Place, trainer: Trainer) -> Row:
    """Time for which a save holds up training, and until it is written."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), keep=1)
        wait_for_device(place)
        started = time.perf_counter()
        checkpoints.save(trainer, {})
        stalled = time.perf_counter() - started
        checkpoints.wait(600)
        written = time.perf_counter() - started
        checkpoints.close()
    return {"stall_seconds": stalled, "written_seconds": written}
