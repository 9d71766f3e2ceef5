"""Measures for how many seconds the outer loop and checkpoints stall an island of one rank."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    with one_rank(place) as ranks:
        trainer = build_case(place).build(place.first, weights_matter=False)
        trainer.step(build_case(place).windows(0))
        size = (
            4
            * sum(spec.matrix_shape[0] * spec.matrix_shape[1] for spec in trainer.params.specs)
            / 1e9
        )
        started = time.perf_counter()
        replica = Replica(OuterConfig(), trainer.params, ranks)
        yield {"name": "replica", "seconds": time.perf_counter() - started, "GB": size}

        def seconds(what: Callable[[], object]) -> Row:
            wait_for_device(place)
            started = time.perf_counter()
            what()
            wait_for_device(place)
            took = time.perf_counter() - started
            return {"seconds": took, "GB": size, "s_per_GB": took / size}

        # The first snapshot page-locks the memory that all later ones use.
        for which in ("first", "later"):
            yield from guarded(
                f"snapshot (pseudo-gradient), {which}", lambda: seconds(replica.pseudo_grads)
            )
        yield from guarded("land (overwrite local params)", lambda: seconds(replica.take_over))
        parts = replica.carried.parts.values()
        yield from guarded(
            "digest of the params", lambda: seconds(lambda: [part_digest(part) for part in parts])
        )
        yield from guarded("checkpoint", lambda: time_checkpoint(place, trainer, 3 * size))


def build_case(place: Place) -> TrainingCase:
    """Return a case with tables and layers as wide as those of 1b.

    It has 1.5 GB of weights, and three times as much in a checkpoint.
    """
    if place.is_tiny:
        return TrainingCase(TINY, 32, 2)
    return TrainingCase(replace(PRESETS["1b"], num_layers=2), 2048, 1)


def time_checkpoint(place: Place, trainer: Trainer, size: float) -> Row:
    """Return the seconds for which a save of `size` GB stalls training, and until it is written."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), keep=1)
        wait_for_device(place)
        started = time.perf_counter()
        checkpoints.save(trainer, {})
        stalled = time.perf_counter() - started
        checkpoints.wait(600)
        written = time.perf_counter() - started
        checkpoints.close()
    return {
        "stall_seconds": stalled,
        "written_seconds": written,
        "GB": size,
        "s_per_GB": written / size,
    }
