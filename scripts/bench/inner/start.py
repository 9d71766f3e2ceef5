"""Measures the time from the start of an island's process to its first inner step, by phase.

    python -m scripts.bench.inner.start [--repeats 3]

One island of one process and a small model, over TLS, at a rendezvous on this machine. Each phase
has its wall time and the processor time of all threads, the medians of the repeats; every repeat is
a process of its own. A first process, which prepares the text, is left out. On a machine with other
work, look at the processor time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

CONFIG = """
name: start
model: {preset: 1m, dim: 64, num_layers: 2, ffn_dim: 256}
data: {source: python-stdlib, seq_len: 64, max_tokens: 200000}
optimizer: {tokens_per_step: 512, warmup_steps: 0}
outer: {rounds: 1, inner_steps: 2, transport: tls, start_islands: 1}
island: {micro_batch: 2}
"""
PHASES = {
    "command line": "diloco.cli.main, with typer",
    "config": "diloco.config.schema, with pydantic; reading and checking the file",
    "torch": "import torch",
    "other imports": "the rest of what a rank imports: trainer, checkpoints, outer loop",
    "host memory": "checks that there is enough of it for the plan",
    "process group": "with one rank: no rendezvous",
    "data": "opens prepared text",
    "model": "model, first weights, optimizer (for which torch imports its compiler)",
    "connections": "rendezvous, TLS, membership",
    "outer loop": "canonical space, parts, first digest",
    "speed of products": "measured for the mfu of the records",
    "first step": "forward, backward, optimizer",
    "other": "records, keys, checkpoints to resume from, the start of the run",
}
LIMIT_SECONDS = 600


class Clock:
    """Times of phases, which do not overlap."""

    def __init__(self) -> None:
        self.phases: dict[str, tuple[float, float]] = {}
        self._begun = time.perf_counter(), time.process_time()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function so that its first call is timed as a phase."""

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            wall = time.perf_counter()
            cpu = time.process_time()
            result = function(*args, **options)
            self.phases.setdefault(name, (time.perf_counter() - wall, time.process_time() - cpu))
            return result

        return call

    def result(self) -> dict[str, tuple[float, float]]:
        """Return all phases, and the rest of the time so far as `other`."""
        wall = time.perf_counter() - self._begun[0]
        cpu = time.process_time() - self._begun[1]
        known = [sum(spent[index] for spent in self.phases.values()) for index in range(2)]
        return self.phases | {"other": (wall - known[0], cpu - known[1])}


def measure_here(path: Path, overrides: list[str]) -> None:
    """Run the island in this process up to the end of its first inner step, print the phases as
    JSON, and end.
    """
    clock = Clock()
    clock.timed("command line", import_module)("diloco.cli.main")
    config = clock.timed(
        "config", lambda: import_module("diloco.config.schema").load_config(path, overrides)
    )()
    clock.timed("torch", import_module)("torch")
    train = clock.timed("other imports", import_module)("diloco.train")
    for where, name, phase in (
        ("diloco.train", "require_host_memory", "host memory"),
        ("diloco.runtime.corpus", "load_corpus", "data"),
        ("diloco.assemble", "build_trainer", "model"),
        ("diloco.assemble", "build_loop", "outer loop"),
        ("diloco.assemble", "build_mfu_meter", "speed of products"),
        ("diloco.connections", "connect", "connections"),
    ):
        module = import_module(where)
        setattr(module, name, clock.timed(phase, getattr(module, name)))
    trainer = import_module("inner.trainer").Trainer
    step = clock.timed("first step", trainer.step)

    def first_step(*args: Any) -> None:
        step(*args)
        print(json.dumps(clock.result()), flush=True)
        os._exit(0)  # The measurement is done, and no other island needs to know of the end.

    trainer.step = first_step
    train.train(config, 0)


def measure(folder: Path, address: str, number: int) -> dict[str, tuple[float, float]]:
    """Measure one start in a process of its own, and return its phases."""
    words = [f"name=start-{number}", f"island.run_dir={folder}", f"island.bootstrap=[{address}]"]
    command = [
        sys.executable,
        "-m",
        "scripts.bench.inner.start",
        "--here",
        str(folder / "start.yaml"),
        *words,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--here", nargs="+", metavar="WORD", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        measure_here(Path(arguments.here[0]), arguments.here[1:])
    from outer.membership.rendezvous import serve_rendezvous

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rendezvous = serve_rendezvous("127.0.0.1", 0)
        (folder / "start.yaml").write_text(CONFIG)
        results = [
            measure(folder, rendezvous.address, number) for number in range(arguments.repeats + 1)
        ][1:]
        rendezvous.close()
    together = [0.0, 0.0]
    print(f"{'phase':18} {'wall s':>7} {'CPU s':>7}")
    for phase, meaning in PHASES.items():
        if any(phase in result for result in results):
            wall, cpu = (median(result[phase][index] for result in results) for index in range(2))
            together = [together[0] + wall, together[1] + cpu]
            print(f"{phase:18} {wall:7.2f} {cpu:7.2f}  {meaning}")
    print(f"{'together':18} {together[0]:7.2f} {together[1]:7.2f}")


if __name__ == "__main__":
    main()
