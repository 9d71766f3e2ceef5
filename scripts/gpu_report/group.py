"""Checks NCCL in a group of one rank: collectives, torch's record of them, and a hang's verdict."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.watchdog.activity import ActivityMonitor
from diloco.watchdog.hang_verdict import is_complete
from diloco.watchdog.watchdog import HUNG, Watchdog, WatchedRank, flight_record
from scripts.gpu_report.place import ROOT, Place, Row, guarded
from scripts.gpu_report.training import TINY, TrainingCase, one_rank, wait_for_device

ELEMENTS = 1 << 20
STEPS = 3
"""Number of steps after which the watchdog has measured a kind of work."""
WATCHDOG_SECONDS = 3.0
STUCK_SECONDS = 12.0
"""How long the device stays stuck if nothing ends the process."""
CYCLES_PER_SECOND = 2e9
"""A rate that GPUs hardly exceed."""
LIMIT_SECONDS = 90.0

Collective = Callable[[Tensor, Tensor], object]
"""Reads the first tensor and leaves the result in the second one. On one rank the two are equal."""
COLLECTIVES: dict[str, Collective] = {
    "all_gather_into_tensor": lambda values, result: dist.all_gather_into_tensor(result, values),
    "reduce_scatter_tensor": lambda values, result: dist.reduce_scatter_tensor(result, values),
    "all_to_all_single": lambda values, result: dist.all_to_all_single(result, values),
    "all_reduce": lambda values, result: dist.all_reduce(result.copy_(values)),
    "broadcast": lambda values, result: dist.broadcast(result.copy_(values), src=0),
}


def check_group(place: Place) -> Iterator[Row]:
    with one_rank(place):
        for name, collective in COLLECTIVES.items():
            yield from guarded(
                name, lambda collective=collective: check_collective(place, collective)
            )
        yield from guarded("flight recorder", check_record)
    yield from guarded("watchdog, device stuck", lambda: describe_hang(place))


def check_collective(place: Place, collective: Collective) -> Row:
    """Compare the result of a collective with its input, and time it.

    The first call creates the communicator.
    """
    values = torch.randn(ELEMENTS, device=place.first)
    result = torch.empty_like(values)
    took = [call_seconds(place, lambda: collective(values, result)) for _ in range(3)]
    same = torch.equal(values, result)
    return {"first_ms": 1e3 * took[0], "later_ms": 1e3 * min(took[1:]), "equal": same, "ok": same}


def call_seconds(place: Place, work: Callable[[], object]) -> float:
    wait_for_device(place)
    started = time.perf_counter()
    work()
    wait_for_device(place)
    return time.perf_counter() - started


def check_record() -> Row:
    """Check that torch's flight recorder has all collectives, and that they are complete.

    From its entries the watchdog finds out what hangs.
    """
    entries = flight_record()
    found = sorted({entry["profiling_name"] for entry in entries})
    complete = sum(is_complete(entry) for entry in entries)
    return {
        "recorded": found,
        "entries": len(entries),
        "complete": complete,
        "ok": 0 < complete == len(entries),
    }


def describe_hang(place: Place) -> Row:
    """Train in a process of its own until its device is stuck.

    Return the verdict of its watchdog, and how it ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.gpu_report.group", place.device, folder]
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS * place.patience,
        )
        seconds = time.monotonic() - started
        verdict = Path(folder, "verdict")
        dump = Path(folder, "hang-0.txt")
        said = (
            verdict.read_text()
            if verdict.exists()
            else f"none; the end of its errors: {done.stderr[-500:]}"
        )
        is_good = done.returncode == HUNG and "rank 0" in said and dump.exists()
        return {"verdict": said, "exit_status": done.returncode, "seconds": seconds, "ok": is_good}


def hang(place: Place, folder: Path) -> None:
    """Train, and make the last step with a stuck device.

    The watchdog ends this process with the status HUNG.
    """
    activity = ActivityMonitor(WATCHDOG_SECONDS)

    def report(verdict: str) -> None:
        (folder / "verdict").write_text(verdict)

    with one_rank(place):
        case = TrainingCase(TINY, 32, 2)
        trainer = case.build(place.first)
        with Watchdog(activity, WatchedRank(rank=0, num_ranks=1, folder=folder, report=report)):
            for step in range(STEPS + 1):
                activity.start("inner step")
                if step == STEPS:
                    keep_busy(place)
                # NCCL only enqueues it, and it waits as long as the device does.
                dist.all_reduce(torch.ones(1, device=place.first))
                trainer.step(case.windows(step))


def keep_busy(place: Place) -> None:
    """Give the device work that delays all later work; on a CPU the thread itself waits."""
    if place.is_tiny:
        time.sleep(STUCK_SECONDS * place.patience)
    else:
        torch.cuda._sleep(int(STUCK_SECONDS * CYCLES_PER_SECOND))


if __name__ == "__main__":
    hang(Place(sys.argv[1]), Path(sys.argv[2]))
    # gloo's threads sometimes abort during a normal interpreter shutdown.
    os._exit(0)
