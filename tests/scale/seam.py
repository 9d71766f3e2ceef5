"""One rank of real sizes on the device that computes nothing, where its values go to the host and
come back.

`python -m tests.scale.seam` prints as JSON the copies, the reads and the waits of the host for each
thing done.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable

import torch

from inner.checkpoint.state import live_tensors
from inner.dry_run.accelerator import DEVICE_TYPE, WAITS
from inner.dry_run.rehearsal import build_rehearsing_trainer
from inner.dry_run.step_tracker import StepTracker
from inner.dry_run.world import enter_world, without_values
from inner.mesh import Degrees, IslandMesh
from inner.optim.moments import ParamsAndMoments
from inner.params import copy_to_host
from tests.scale.test_dry_run import Case


def count(work: Callable[[], object]) -> dict[str, int]:
    WAITS.clear()
    with StepTracker() as tracker:
        work()
    found = Counter({"waits": WAITS.total()})
    for what, times in tracker.crossings.items():
        found[what.partition(",")[0]] += times
    return dict(found)


def main() -> None:
    case = Case("8b", Degrees(dp_shard=4, tp=2), num_layers=2).rehearsal
    enter_world(case.degrees.num_ranks, case.rank)
    mesh = IslandMesh(case.degrees, DEVICE_TYPE)
    with without_values():
        trainer = build_rehearsing_trainer(case, mesh)
        seam = ParamsAndMoments(trainer.params, trainer.optimizers)
        saved = [
            tensor for tensor, *_ in live_tensors(trainer.model_parts, trainer.optimizers).values()
        ]
        new = {index: torch.empty(held.shape) for index, held in enumerate(seam.slices)}
        read = seam.read_all(new)
        copies = copy_to_host(saved)
        found = {
            "slices": len(new),
            "tensors": len(saved),
            "is_on_host": all(values.device.type == "cpu" for values in read.values()),
            "keeps_types": [type(copy) for copy in copies] == [type(tensor) for tensor in saved],
            "read": count(lambda: seam.read_all(new)),
            "write": count(lambda: seam.write_all(new)),
            "save": count(lambda: copy_to_host(saved)),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
