"""What listens while the commands run: on one machine nothing beyond loopback but at
island.listen_host.
"""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from diloco.doctor.listeners import ListeningSocket
from diloco.runtime.processes import Child, start, stop
from tests.sockets import beyond_loopback, marked, watch_sockets
from tests.swarm import TEXT, TINY

pytestmark = pytest.mark.slow
DILOCO = [sys.executable, "-m", "diloco"]
LONG = "outer.rounds=100000"
Started = list[Child]


@pytest.fixture
def started() -> Iterator[Started]:
    """The processes of a test, which are stopped at its end."""
    processes: Started = []
    yield processes
    stop(processes)


@pytest.fixture
def values(tmp_path: Path) -> list[str]:
    """A config, and overrides that keep a run of it inside the test's folder."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return [str(tmp_path / "tiny.yaml"), f"data.paths=[{tmp_path / 'text'}]", *folders(tmp_path)]


def folders(tmp_path: Path) -> list[str]:
    return [f"island.run_dir={tmp_path / 'runs'}", f"island.cache_dir={tmp_path / 'cache'}"]


def begin(started: Started, log: Path, *command: str) -> Child:
    started.append(start(log.stem, [*DILOCO, *command], log, marked(log.parent)))
    return started[-1]


def commits(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"committed": true') if path.exists() else 0


def watch(started: Started, folder: Path, is_over: Callable[[], bool]) -> set[ListeningSocket]:
    """All sockets that have listened until `is_over()`. Fails the test when a process of it has
    failed.
    """

    def look() -> bool:
        failed = [child.log_tail(40) for child in started if child.exit_code]
        assert not failed, "\n".join(failed)
        return is_over()

    return watch_sockets(folder, look)


def address_of(child: Child) -> str:
    deadline = time.monotonic() + 60
    while "address: " not in child.log_tail():
        assert time.monotonic() < deadline and child.exit_code is None, child.log_tail()
        time.sleep(0.05)
    return child.log.read_text().split("address: ")[1].splitlines()[0]


def own_address() -> str:
    """The address of this machine in its network. Skips the test if it has none."""
    with closing(socket.socket(type=socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


@pytest.mark.parametrize("transport", ["gloo", "tls", "hivemind"])
def test_a_simulation_and_its_baseline_listen_on_loopback_only(
    tmp_path, values, started, transport
):
    options = ["--islands", "2", "--ranks", "2", "--baseline", f"outer.transport={transport}"]
    simulation = begin(started, tmp_path / "log.txt", "simulate", *values, *options)
    seen = watch(started, tmp_path, lambda: simulation.exit_code is not None)
    assert simulation.exit_code == 0 and commits(tmp_path / "runs" / "test" / "island-1") == 3
    assert len({each.pid for each in seen}) >= 7, (
        "four ranks, two ranks of the baseline and the bootstrap"
    )
    assert beyond_loopback(seen) == []


@pytest.mark.parametrize(
    ("transport", "rendezvous"), [("gloo", "tcp"), ("tls", "tcp"), ("hivemind", "dht")]
)
def test_islands_and_a_joiner_listen_at_their_listen_host_only(
    tmp_path, values, started, transport, rendezvous
):
    host = own_address()
    served = begin(
        started, tmp_path / "bootstrap.txt", "bootstrap", "--rendezvous", rendezvous, "--host", host
    )
    address, settings = (
        address_of(served),
        [f"island.listen_host={host}", LONG, "outer.start_islands=2"],
    )
    for index in range(2):
        own = [
            f"outer.transport={transport}",
            f"island.index={index}",
            f"island.bootstrap=[{address}]",
        ]
        begin(
            started,
            tmp_path / f"log-{index}.txt",
            "launch",
            *values,
            "--ranks",
            "2",
            *own,
            *settings,
        )
    run = tmp_path / "runs" / "test"
    seen = watch(started, tmp_path, lambda: commits(run / "island-0") >= 2)
    own = [f"island.data_paths=[{tmp_path / 'text'}]", *folders(tmp_path), settings[0]]
    begin(started, tmp_path / "joiner.txt", "join", address, "--ranks", "2", *own)
    seen |= watch(started, tmp_path, lambda: commits(run / "island-2") >= 1)
    assert {each.pid for each in seen if each.host == host}, "the islands listen for one another"
    assert "\n".join(beyond_loopback(seen, host)) == ""
