"""A loop of one's own under many faults: examples/own_data.py on several islands, as its users run
it.

`pytest -m slow tests/examples/test_example_storm.py`
"""

import signal
import subprocess
from pathlib import Path

import pytest

from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account
from diloco.runtime.operator_requests import STOP, make_request
from tests.examples.test_examples import RUNS, Example
from tests.faults.bootstraps import bootstrap
from tests.faults.waits import until
from tests.swarm import GUARD_SECONDS

NAME = "own_data"
SETTINGS = [
    "outer.rounds=100000",
    "outer.start_islands=3",
    "outer.quorum=2",
    "outer.below_quorum=wait",
]
SETTINGS += ["data.order=shards", "data.shard_tokens=16384", "island.shards.cache_gb=0.001"]


class Storm:
    """Islands 0 to 2, which begin, and 3, which joins; each round that is waited for is one of
    island `asked`.
    """

    def __init__(self, folder: Path, transport: str, address: str) -> None:
        common = [*SETTINGS, f"outer.transport={transport}", f"island.bootstrap=[{address}]"]
        self._example = Example(folder, NAME, common)
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        own = [
            f"island.cache_dir={self.folder / f'cache-{index}'}",
            *(["island.joins=true"] if index == 3 else []),
        ]
        self.processes[index] = self._example.start(index, *own)

    def signal(self, index: int, number: int) -> None:
        self.processes[index].send_signal(number)

    def kill(self, index: int) -> None:
        self.signal(index, signal.SIGKILL)
        self.processes[index].wait(GUARD_SECONDS)

    def wait_for_rounds_with(self, islands: set[int], asked: int) -> None:
        """Wait until an island has committed three more rounds in which exactly these take part."""
        after, names = (
            max(self._example.rounds(asked), default=-1),
            [f"island-{index}" for index in sorted(islands)],
        )

        def have_come() -> bool:
            self._check_alive()
            found = self._example.rounds(asked).items()
            return (
                sum(number > after and record["participants"] == names for number, record in found)
                >= 3
            )

        until(have_come, f"three rounds of {names} on island {asked}")

    def end(self) -> set[str]:
        """Let all islands leave after one round. Returns the last lines that they have printed."""
        make_request(self.folder / "runs" / RUNS[NAME], STOP)
        for index, process in self.processes.items():
            assert process.wait(GUARD_SECONDS) == 0, self._log(index)
        return {self._log(index).splitlines()[-1] for index in self.processes}

    def close(self) -> None:
        for process in self._example.processes:
            process.kill()
            process.wait(GUARD_SECONDS)

    def _check_alive(self) -> None:
        for index, process in self.processes.items():
            assert process.poll() in (None, -signal.SIGKILL), (
                f"island {index} has ended:\n{self._log(index)}"
            )

    def _log(self, index: int) -> str:
        return self._example.log(index).read_text()[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["tls", "hivemind"])
def test_kills_a_freeze_and_a_joiner_leave_one_digest_and_no_unit_read_twice(
    tmp_path: Path, transport: str
) -> None:
    with bootstrap(transport, tmp_path) as place:
        storm = Storm(tmp_path, transport, place.address)
        try:
            for index in range(3):
                storm.start(index)
            storm.wait_for_rounds_with({0, 1, 2}, asked=0)
            storm.kill(1)
            storm.wait_for_rounds_with({0, 2}, asked=0)
            storm.start(1)
            storm.start(3)
            storm.wait_for_rounds_with({0, 1, 2, 3}, asked=3)
            storm.signal(0, signal.SIGSTOP)
            storm.wait_for_rounds_with({1, 2, 3}, asked=1)
            storm.kill(2)
            storm.signal(0, signal.SIGCONT)
            storm.wait_for_rounds_with({0, 1, 3}, asked=0)
            storm.start(2)
            storm.kill(3)
            storm.wait_for_rounds_with({0, 1, 2}, asked=2)
            storm.start(3)
            storm.wait_for_rounds_with({0, 1, 2, 3}, asked=3)
            ends = storm.end()
        finally:
            storm.close()
    assert len(ends) == 1 and next(iter(ends)).startswith("the run is over, digest "), ends
    account = data_account(read_run(tmp_path / "runs" / RUNS[NAME]).islands)
    assert account["units_repeated"] == 0
    assert account["units_trained"] == account["steps_accounted"] > 0
