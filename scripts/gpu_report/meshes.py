"""Compares losses of an island of two ranks with losses of one rank, in fp32.

Every dimension, context method and schedule is a case. Two ranks make all cases one after the
other, so that Python, CUDA and NCCL start once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from diloco.config.schema import IslandConfig
from diloco.runtime.process_group import open_process_group
from inner.config import ParallelConfig
from inner.mesh import Degrees
from inner.model.sizes import PRESETS
from scripts.gpu_report.numerics import difference, train
from scripts.gpu_report.place import ROOT, Place, Row, guarded, parse_row
from scripts.gpu_report.training import TINY, TrainingCase, one_rank

NUM_RANKS = 2
LOSS_TOLERANCE = 1e-3
SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "breadth_first",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
MESHES: dict[str, tuple[Degrees, dict[str, str]]] = {
    "dp_shard 2": (Degrees(dp_shard=2), {}),
    "dp_shard 2, gradients whole": (Degrees(dp_shard=2), {"accumulate": "whole"}),
    "dp_replicate 2": (Degrees(dp_replicate=2), {}),
    "tp 2": (Degrees(tp=2), {}),
    **{
        f"cp 2, {kind}": (Degrees(cp=2), {"context": kind})
        for kind in ("ring", "all_gather", "ulysses")
    },
    **{f"pp 2, {kind}": (Degrees(pp=2), {"schedule": kind}) for kind in SCHEDULES},
}
"""Degrees and settings of island.parallel, by name."""


def compare_meshes(place: Place) -> Iterator[Row]:
    """Start two ranks, which print a row for each mesh.

    A rank that hangs ends the section. The rows before are kept.
    """
    with one_rank(place):
        expected = [step.loss for step in train(build_case(place), place.first)]
    launcher = [sys.executable, "-m", "diloco.runtime.rank_launcher", str(NUM_RANKS), "0"]
    ranks = [*launcher, "scripts.gpu_report.meshes", place.device, json.dumps(expected)]
    with subprocess.Popen(ranks, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield from parse_row(line)
            if process.wait():
                raise RuntimeError(f"the ranks ended with status {process.returncode}")
        finally:
            process.terminate()


def build_case(place: Place) -> TrainingCase:
    """Return the case of one rank.

    Eight layers and sixteen sequences are enough for every schedule.
    """
    sizes, seq_len = (TINY, 32) if place.is_tiny else (PRESETS["1m"], 256)
    return TrainingCase(replace(sizes, num_layers=8), seq_len, 2, "float32", num_micro_batches=8)


def run_rank(place: Place, expected: list[float]) -> None:
    """Make all cases on this rank, and print the rows on the first one."""
    rank = int(os.environ["RANK"])
    device = "cpu" if place.is_tiny else f"cuda:{rank}"
    settings = {"device": place.device, "ranks": NUM_RANKS, "matmul_precision": "highest"}
    with open_process_group(IslandConfig.model_validate(settings), device):
        for name, mesh in MESHES.items():
            for row in guarded(name, lambda mesh=mesh: compare(place, device, expected, *mesh)):
                if rank == 0:
                    print(json.dumps(row), flush=True)


def compare(
    place: Place, device: str, expected: list[float], degrees: Degrees, settings: dict[str, str]
) -> Row:
    """Train with this mesh, and compare the losses. Every rank must call it."""
    case = replace(
        build_case(place), degrees=degrees, parallel=ParallelConfig.model_validate(settings)
    )
    found = [step.loss for step in train(case, device)]
    worst = max(difference(a, b) for a, b in zip(found, expected, strict=True))
    return {"worst_difference": worst, "steps": len(found), "ok": worst <= LOSS_TOLERANCE}


if __name__ == "__main__":
    run_rank(Place(sys.argv[1]), json.loads(sys.argv[2]))
    # gloo's threads sometimes abort during a normal interpreter shutdown.
    os._exit(0)
