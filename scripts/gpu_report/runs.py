"""Whole runs of `diloco simulate`: two islands, which may share a GPU, and a rank that hangs.

The hang takes two GPUs.
"""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from diloco.records.environment import read_environment
from diloco.records.run_folder import IslandRecords, read_run
from diloco.report.summary import summarise
from scripts.bench.simulation import ROOT, simulate_in
from scripts.gpu_report.place import Place, Row, guarded

LIMIT_SECONDS = 60.0
"""Limit of one run."""
WATCHDOG_SECONDS = 8
CPU_WATCHDOG_SECONDS = 40
"""Limits of the watchdog. On a busy CPU an evaluation takes longer than on a GPU."""
ROUNDS = 4
SMALL = ["model.preset=15m"]
TINY = [
    "model.preset=1m",
    "data.seq_len=64",
    "optimizer.tokens_per_step=512",
    "evaluate.tokens=4096",
]
"""Settings for a CPU."""
KILL = "kill:1@round=1,back=1"
RUNS = {
    "gloo": ["outer.transport=gloo", "outer.codec=int8"],
    "tls, delay 3": ["outer.transport=tls", "outer.codec=int4", "outer.delay=3"],
    # With a quorum of both islands, the rounds wait until the killed one is back.
    "tls, island 1 killed and back": [
        "outer.transport=tls",
        "outer.codec=int8",
        "outer.quorum=2",
        "--fault",
        KILL,
    ],
    "hivemind, delay 3": ["outer.transport=hivemind", "outer.codec=int4", "outer.delay=3"],
}
"""Arguments by name, over each network: training waits for rounds, or goes on during them."""


def run_two_islands(place: Place) -> Iterator[Row]:
    for name, arguments in RUNS.items():
        if "hivemind" in name and find_spec("hivemind") is None:
            yield {"name": name, "left_out": "the package hivemind is not installed"}
        else:
            yield from guarded(name, lambda arguments=arguments: describe_islands(place, arguments))


def describe_islands(place: Place, arguments: list[str]) -> Row:
    settings = [
        *(TINY if place.is_tiny else SMALL),
        f"outer.rounds={ROUNDS}",
        f"evaluate.every_rounds={ROUNDS}",
    ]
    # The section `numerics` checks compiled layers; here compiling would take longer than all
    # rounds.
    settings.append("island.parallel.compile=false")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = run(
            place, Path(folder), ["--islands", "2", "--ranks", "1", *settings, *arguments]
        )
        summary = summarise(run_dir)
        islands = read_run(run_dir).islands
        gpus = [(read_environment(run_dir / island.name) or {}).get("gpus") for island in islands]
    stalled = sum(record.stalled_seconds for island in islands for record in island.rounds)
    trained = sum(step.seconds for island in islands for step in island.steps)
    starts = [sum(event.name == "joined" for event in island.events) for island in islands]
    is_back = KILL not in arguments or starts[1] > 1
    return {
        "gpus": gpus,
        "rounds": summary["rounds_committed"],
        "aborted": summary["rounds_aborted"],
        "joined": starts,
        "training_share": trained / (trained + stalled),
        "MB_sent": sum(summary["bytes_sent"].values()) / 1e6,
        "ok": summary["digests_equal"] is True
        and summary["rounds_committed"] == ROUNDS
        and is_back,
    }


def hang_a_rank(place: Place) -> Iterator[Row]:
    """Stop one of two ranks, and report the verdict of the watchdog."""
    yield from guarded("rank 1 stopped", lambda: describe_hang(place))


def describe_hang(place: Place) -> Row:
    # At this step the watchdog has measured three pieces of work of each kind.
    fault = ["--fault", "freeze:0@step=18,process=rank1,seconds=600"]
    seconds = CPU_WATCHDOG_SECONDS if place.is_tiny else WATCHDOG_SECONDS
    settings = [f"island.watchdog_seconds={seconds}", "outer.rounds=6", "outer.inner_steps=4"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--islands", "1", "--ranks", "2", "outer.transport=gloo", *settings, *fault]
        with suppress(
            RuntimeError
        ):  # The run fails, as it should: the watchdog ends its only island.
            run(place, Path(folder), arguments)
        verdict = find_verdict(read_run(Path(folder) / "run").islands[0])
    return {"verdict": verdict, "ok": "rank 1" in verdict}


def find_verdict(island: IslandRecords) -> str:
    return "; ".join(event.text for event in island.events if event.name == "hung") or "none"


def run(place: Place, folder: Path, arguments: list[str]) -> Path:
    """Run configs/quickstart.yaml with these arguments and return the run's folder. Raises
    RuntimeError if it fails.
    """
    config = str(ROOT / "configs" / "quickstart.yaml")
    device = f"island.device={place.device}"
    return simulate_in(folder, [config, *arguments, device], LIMIT_SECONDS * place.patience)
