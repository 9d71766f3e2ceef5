"""The examples as a user runs them: two islands are two processes over a network, one is killed and
comes back.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account
from diloco.watchdog.signals import end_with_parent
from tests.faults.bootstraps import bootstrap
from tests.swarm import GUARD_SECONDS, read_records

ROOT = Path(__file__).parents[2]
RUNS = {
    "own_loop": "example",
    "own_data": "example-data",
    "huggingface_trainer": "example",
    "lora_sft": "lora",
    "lightning_fabric_loop": "fabric",
    "lightning_trainer": "lightning",
    "olmo_core_trainer": "olmo-core",
    "script_like_nanochat": "like-nanochat",
}
NEEDS = {"lightning_trainer": "lightning", "olmo_core_trainer": "olmo_core"}
"""Packages that the development install may lack."""
EACH = [*RUNS]
FAULT = "kill:1@round=2,phase=send"


class Example:
    """The islands of an example, each a process that writes into a folder of its own."""

    def __init__(self, folder: Path, name: str, settings: list[str]) -> None:
        self.folder, self.name, self._settings = folder, name, settings
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, index: int, *own: str) -> subprocess.Popen[bytes]:
        """Start an island, with settings of its own."""
        script = str(ROOT / "examples" / f"{self.name}.py")
        command = [sys.executable, script, f"island.index={index}", *self._settings, *own]
        variables = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        with self.log(index).open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=variables,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,
            )
        self.processes.append(process)
        return process

    def log(self, index: int) -> Path:
        return self.folder / f"log-{index}.txt"

    def rounds(self, index: int) -> dict[int, dict]:
        """Committed rounds of an island by number."""
        found = read_records(
            self.folder / "runs" / RUNS[self.name] / f"island-{index}" / "metrics.jsonl"
        )
        return {
            record["round"]: record
            for record in found
            if record["kind"] == "round" and record["committed"]
        }


@contextmanager
def example(folder: Path, name: str, transport: str) -> Iterator[Example]:
    """An example whose islands wait for each other, in an own folder. Kills all at the end."""
    with bootstrap(transport, folder) as place:
        settings = [
            f"outer.transport={transport}",
            f"island.bootstrap=[{place.address}]",
            "outer.quorum=2",
        ]
        if name == "own_data":
            settings += [f"island.cache_dir={folder / 'cache'}"]
        settings += ["outer.rounds=5", "outer.below_quorum=wait", f"island.faults=[{FAULT!r}]"]
        made = Example(folder, name, settings)
        try:
            yield made
        finally:
            for process in made.processes:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait(GUARD_SECONDS)


@pytest.mark.parametrize(
    "name, transport",
    [
        pytest.param("own_loop", "tls", marks=pytest.mark.slow),
        pytest.param("own_data", "tls"),
        pytest.param("huggingface_trainer", "tls"),
        pytest.param("lora_sft", "tls", marks=pytest.mark.slow),
        pytest.param("lightning_fabric_loop", "tls", marks=pytest.mark.slow),
        pytest.param("lightning_trainer", "tls", marks=pytest.mark.slow),
        pytest.param("olmo_core_trainer", "tls", marks=pytest.mark.slow),
        pytest.param("script_like_nanochat", "tls", marks=pytest.mark.slow),
        *(pytest.param(name, "hivemind", marks=pytest.mark.slow) for name in EACH),
    ],
)
def test_both_islands_end_with_one_digest_though_one_was_killed(
    tmp_path: Path, name: str, transport: str
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs the package {NEEDS[name]}")
    with example(tmp_path, name, transport) as made:
        first, second = made.start(0), made.start(1)
        assert second.wait(GUARD_SECONDS) == -signal.SIGKILL, made.log(1).read_text()[-3000:]
        again = made.start(1)
        for index, process in ((0, first), (1, again)):
            assert process.wait(GUARD_SECONDS) == 0, made.log(index).read_text()[-3000:]
        ends = {made.log(index).read_text().splitlines()[-1] for index in (0, 1)}
        assert len(ends) == 1 and next(iter(ends)).startswith("the run is over, digest ")
        assert made.rounds(1)[4]["participants"] == ["island-0", "island-1"]
        account = data_account(read_run(tmp_path / "runs" / RUNS[name]).islands)
        assert account["units_repeated"] == 0
        assert account["units_trained"] == account["steps_accounted"]
