"""Whole runs by `diloco simulate` on two GPUs: two islands, and a rank that hangs."""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from diloco.records.run_folder import IslandRecords, read_run
from diloco.report.summary import summarise
from scripts.bench.simulation import ROOT, simulate_in
from scripts.gpu_report.place import Place, Row, guarded

LIMIT_SECONDS = 100.0
"""For one run."""
WATCHDOG_SECONDS, CPU_WATCHDOG_SECONDS = 8, 40
"""On a busy CPU an evaluation takes longer than on a GPU."""


def run_two_islands(place: Place) -> Iterator[Row]:
    """Two islands over each network, with training that waits for rounds and with training that goes on meanwhile."""
    for transport in ("gloo", "hivemind"):
        for delay in (0, 3):
            overrides = [f"outer.transport={transport}", f"outer.delay={delay}", "outer.codec=int4"]
            name = f"{transport}, delay {delay}"
            yield from guarded(name, lambda overrides=overrides: describe_islands(place, overrides))


def describe_islands(place: Place, overrides: list[str]) -> Row:
    preset = "1m" if place.is_tiny else "150m"
    sizes = [f"model.preset={preset}", "outer.rounds=4", "outer.inner_steps=5", "evaluate.every_rounds=4"]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = run(place, Path(folder), ["--islands", "2", "--ranks", "1", *sizes, *overrides])
        summary, islands = summarise(run_dir), read_run(run_dir).islands
    stalled = sum(record.stalled_seconds for island in islands for record in island.rounds)
    trained = sum(step.seconds for island in islands for step in island.steps)
    return {
        "rounds": summary["rounds_committed"],
        "aborted": summary["rounds_aborted"],
        "training_share": trained / (trained + stalled),
        "MB_sent": sum(summary["bytes_sent"].values()) / 1e6,
        "ok": summary["digests_equal"] is True and summary["rounds_committed"] == 4,
    }


def hang_a_rank(place: Place) -> Iterator[Row]:
    """Stop one of two ranks: what the watchdog says."""
    yield from guarded("rank 1 stopped", lambda: describe_hang(place))


def describe_hang(place: Place) -> Row:
    # Late enough that the watchdog has measured three pieces of work of each kind.
    fault = ["--fault", "freeze:0@step=18,process=rank1,seconds=600"]
    seconds = CPU_WATCHDOG_SECONDS if place.is_tiny else WATCHDOG_SECONDS
    settings = [f"island.watchdog_seconds={seconds}", "outer.rounds=6", "outer.inner_steps=4"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--islands", "1", "--ranks", "2", "outer.transport=gloo", *settings, *fault]
        with suppress(RuntimeError):  # The run fails, as it should: the watchdog ends its only island.
            run(place, Path(folder), arguments)
        verdict = find_verdict(read_run(Path(folder) / "run").islands[0])
    return {"verdict": verdict, "ok": "rank 1" in verdict}


def find_verdict(island: IslandRecords) -> str:
    return "; ".join(event.text for event in island.events if event.name == "hung") or "none"


def run(place: Place, folder: Path, arguments: list[str]) -> Path:
    """Run configs/quickstart.yaml with these arguments and return the run's folder. Raises RuntimeError if it fails."""
    config, device = str(ROOT / "configs" / "quickstart.yaml"), f"island.device={place.device}"
    return simulate_in(folder, [config, *arguments, device], LIMIT_SECONDS * place.patience)
