"""The fault injector on real processes that sleep where an island would train."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.config.schema import IslandConfig
from diloco.errors import ConfigError
from diloco.faults.self_inflicted import claim
from diloco.faults.spec import Fault, parse_fault
from diloco.network_emulation.namespaces import PREFIX, Namespace, ip, list_namespaces, open_net
from diloco.records.faults import read_faults
from diloco.records.metrics import EventRecord, Metrics, RoundRecord, StepRecord
from diloco.runtime.processes import find_process, find_processes, island_command, start, stop
from diloco.simulate.fleet import Fleet, changed_values, port_of
from diloco.simulate.injector import FaultInjector

# Like the launcher of ranks, it starts its worker in a session of its own and ends the worker on
# SIGTERM.
ISLAND = """
import signal, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
worker = subprocess.Popen(sleep, start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: (worker.terminate(), sys.exit(1)))
print("begun", flush=True)
worker.wait()
"""
IS_ROOT = os.geteuid() == 0 and shutil.which("ip") is not None


def record(folder: Path, *, rounds: int = 0, steps: int = 0) -> None:
    """Write the last records of an island that has come this far."""
    metrics = Metrics(folder / "metrics.jsonl")
    metrics.write(EventRecord(name="joined"))
    if steps:
        metrics.write(
            StepRecord(
                step=steps, tokens=0, loss=1, lr=1, grad_norm=1, seconds=1, tokens_per_second=1
            )
        )
    if rounds:
        numbers = {"bytes_sent": 0, "bytes_received": 0, "reduce_seconds": 0, "wait_seconds": 0}
        outcome = {
            "participants": (),
            "committed": True,
            "digest": "",
            "pseudo_gradient_norm": None,
        }
        metrics.write(RoundRecord(round=rounds - 1, attempt=0, **numbers, **outcome))
    metrics.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Two islands and a bootstrap process, all running, each island inside its first round."""
    made = Fleet(tmp_path, [])
    command = [sys.executable, "-S", "-c", ISLAND]
    made.services["bootstrap"] = start("bootstrap", command, tmp_path / "bootstrap.txt")
    for index in range(2):
        made.islands[index] = start(
            f"island-{index}", command, tmp_path / f"island-{index}" / "log.txt"
        )
        record(tmp_path / f"island-{index}")
    made.started += [made.services["bootstrap"], *made.islands.values()]
    try:
        for child in made.started:
            wait_until(
                lambda child=child: "begun" in child.log.read_text(), "the start of the worker"
            )
        yield made
    finally:
        stop(made.started)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in time"
        time.sleep(0.01)


def make_injector(fleet: Fleet, *specs: str, storm: Iterator[Fault] | None = None) -> FaultInjector:
    return FaultInjector(fleet, [parse_fault(spec) for spec in specs], storm)


def poll_until(injector: FaultInjector, condition: Callable[[], bool], what: str) -> None:
    wait_until(lambda: injector.poll() or condition(), what)


def done(fleet: Fleet) -> list[str]:
    return [fault.text for fault in read_faults(fleet.run_dir)]


def states(fleet: Fleet, index: int) -> set[str]:
    """State letters in /proc of the island's processes."""
    stats = [
        Path(f"/proc/{pid}/stat").read_text() for pid in find_processes([fleet.islands[index]])
    ]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def test_a_kill_waits_for_its_round_and_ends_every_process_of_the_island(fleet):
    injector = make_injector(fleet, "kill:1@round=3")
    record(fleet.run_dir / "island-1", rounds=2)
    record(fleet.run_dir / "island-0", rounds=9)
    injector.poll()
    assert done(fleet) == [] and len(find_processes([fleet.islands[1]])) == 2
    record(fleet.run_dir / "island-1", rounds=3)
    injector.poll()
    assert done(fleet) == ["killed island-1"]
    assert fleet.islands[1].exit_code == -9 and not find_processes([fleet.islands[1]])
    assert fleet.islands[0].exit_code is None and len(find_processes([fleet.islands[0]])) == 2
    assert injector.ended_by_fault(fleet.islands[1]) and not injector.ended_by_fault(
        fleet.islands[0]
    )


def test_a_killed_island_comes_back_and_counts_as_down_until_it_has_written_something(fleet):
    injector, first = make_injector(fleet, "kill:1@step=4,back=0.1"), fleet.islands[1]
    record(fleet.run_dir / "island-1", steps=4)
    poll_until(injector, lambda: fleet.islands[1] is not first, "the return")
    assert fleet.islands[1].exit_code is None and fleet.islands[1].command == first.command
    assert injector.is_down(1) and not injector.is_down(0)
    record(fleet.run_dir / "island-1")
    injector.poll()
    assert not injector.is_down(1)
    assert done(fleet) == ["killed island-1", "started island-1 again"]


def test_a_frozen_island_stands_still_as_a_whole_and_is_woken(fleet):
    injector = make_injector(fleet, "freeze:0@round=0,seconds=1")
    injector.poll()
    wait_until(lambda: states(fleet, 0) == {"T"}, "the stop of all processes")
    assert injector.is_down(0)
    poll_until(injector, lambda: not injector.is_down(0), "the end of the freeze")
    wait_until(lambda: "T" not in states(fleet, 0), "the waking of all processes")
    assert done(fleet) == ["froze island-0 for 1 s", "woke island-0"]


def test_a_frozen_fleet_can_be_stopped(fleet):
    make_injector(fleet, "freeze:0@round=0,seconds=600", "freeze:1@round=0,seconds=600").poll()
    stop(fleet.started)
    assert not find_processes(fleet.started)


def test_leaving_is_a_request(fleet):
    injector = make_injector(fleet, "leave:1@round=0")
    injector.poll()
    assert injector.is_down(1)
    poll_until(injector, lambda: fleet.islands[1].exit_code is not None, "the end of the island")
    assert fleet.islands[1].exit_code == 1 and injector.ended_by_fault(fleet.islands[1])


def test_the_bootstrap_process_is_killed_and_started_again(fleet):
    injector, first = (
        make_injector(fleet, "kill:bootstrap@round=1,back=0"),
        fleet.services["bootstrap"],
    )
    record(fleet.run_dir / "island-0", rounds=1)
    poll_until(injector, lambda: fleet.services["bootstrap"] is not first, "the return")
    assert done(fleet) == ["killed bootstrap", "started bootstrap again"] and first.exit_code == -9


def test_what_an_island_does_to_itself_is_recorded_and_it_comes_back(fleet):
    fault = parse_fault("kill:1@round=2,phase=decide,back=0")
    injector, first = make_injector(fleet, str(fault)), fleet.islands[1]
    injector.poll()
    assert done(fleet) == []
    claim(fleet.run_dir / "island-1", fault)
    first.process.kill()
    poll_until(injector, lambda: fleet.islands[1] is not first, "the return")
    assert injector.ended_by_fault(first) and not find_processes([first]), (
        "its orphans went before it came back"
    )
    assert done(fleet) == ["island-1 did it in phase 'decide'", "started island-1 again"]


def test_a_joiner_gets_the_next_index_and_can_be_struck_like_the_others(fleet):
    command = [sys.executable, "-S", "-c", ISLAND]

    def join(index: int):
        fleet.started.append(
            start(f"island-{index}", command, fleet.run_dir / f"island-{index}" / "log.txt")
        )
        return fleet.started[-1]

    fleet.join = join
    injector = make_injector(fleet, "kill:2@round=1,back=0", "join:@round=0")
    injector.poll()
    assert sorted(fleet.islands) == [0, 1, 2] and injector.is_down(2)
    record(fleet.run_dir / "island-2", rounds=1)
    poll_until(injector, lambda: len(fleet.started) == 5, "the joiner's return")
    assert done(fleet) == ["island-2 joins", "killed island-2", "started island-2 again"]


def test_a_fault_whose_victim_is_gone_is_recorded_as_not_done(fleet):
    injector = make_injector(fleet, "kill:1@round=0", "freeze:1@round=1")
    injector.poll()
    record(fleet.run_dir / "island-1", rounds=1)
    injector.poll()
    assert done(fleet)[1] == "nothing was done: it is not running"


def test_a_storm_leaves_half_of_the_islands_up(fleet):
    faults = [parse_fault("freeze:0@second=0,seconds=2"), parse_fault("kill:1@second=0")]
    injector = make_injector(fleet, storm=iter(faults))
    injector.poll()
    assert done(fleet) == [], "it begins with the first commit"
    record(fleet.run_dir / "island-0", rounds=1)
    injector.poll()
    injector.poll()
    assert done(fleet) == ["froze island-0 for 2 s"]
    poll_until(injector, lambda: len(done(fleet)) == 3, "the second fault")
    assert done(fleet)[1:] == ["woke island-0", "killed island-1"]


def test_who_is_away_is_not_waited_for_when_another_has_finished(fleet):
    injector = make_injector(fleet, "kill:1@round=0,back=600")
    injector.poll()
    assert not injector.is_over()
    stop([fleet.islands[0]])
    assert not injector.is_over(), "nobody has finished, one will be back"
    fleet.islands[0] = start("island-0", ["true"], fleet.run_dir / "island-0" / "log.txt")
    poll_until(injector, injector.is_over, "the end of the run")


def test_who_comes_after_another_has_finished_is_not_waited_for(fleet):
    injector = make_injector(fleet, "kill:1@round=0,back=0.1")
    poll_until(
        injector,
        lambda: fleet.islands[1].mark != fleet.started[2].mark,
        "the second start of island 1",
    )
    fleet.islands[0] = start(
        "island-0", [sys.executable, "-c", ""], fleet.run_dir / "island-0" / "log.txt"
    )
    fleet.started.append(fleet.islands[0])
    poll_until(injector, lambda: fleet.islands[0].exit_code == 0, "the end of island 0")
    assert injector.is_over()
    record(fleet.run_dir / "island-1")
    injector.poll()
    assert injector.is_over(), "it has come, and finds nobody"


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:31337", "/ip4/127.0.0.1/tcp/31337/p2p/12D3KooW"]
)
def test_the_port_is_found_in_both_kinds_of_address(address):
    assert port_of(address) == "31337"


def test_a_joiner_is_like_the_islands_of_the_file_but_for_what_the_launcher_sets():
    island = IslandConfig(
        micro_batch=4, index=3, ranks=2, run_dir="x", faults=("slow:3x2",), cache_dir="/c"
    )
    assert changed_values(island) == ["island.micro_batch=4", 'island.cache_dir="/c"']


def answers(source: Namespace, target: Namespace, seconds: float = 10) -> bool:
    """Whether an attempt to connect is answered, even by a refusal, instead of being lost."""
    code = f"import socket; socket.create_connection(({target.host!r}, 9), {seconds})"
    done = subprocess.run(
        source.command(sys.executable, "-S", "-c", code),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "refused" in done.stderr or "timed out" in done.stderr, done.stderr
    return "refused" in done.stderr


def is_silent(source: Namespace, target: Namespace) -> bool:
    return not answers(source, target, seconds=0.5)


@pytest.mark.skipif(not IS_ROOT, reason="network namespaces need root")
def test_a_cut_is_silent_parts_the_pair_alone_and_heals_when_the_last_cut_ends():
    with open_net() as net:
        a, b, c = (net.add() for _ in range(3))
        assert answers(a, b) and answers(b, a)
        net.cut([a], [b, c])
        net.cut([a], [b])
        assert is_silent(a, b) and is_silent(b, a) and answers(b, c)
        net.heal([a], [b, c])
        assert is_silent(a, b) and answers(a, c)
        net.heal([a], [b])
        assert answers(a, b) and answers(b, a)
    assert not [name for name in list_namespaces() if name.startswith(f"{PREFIX}-{os.getpid()}-")]


@pytest.mark.skipif(not IS_ROOT, reason="network namespaces need root")
def test_namespaces_of_a_launcher_that_was_killed_are_removed_by_the_next():
    dead = subprocess.Popen(["true"])
    dead.wait(10)
    ip("netns", "add", f"{PREFIX}-{dead.pid}-1")
    with open_net():
        assert f"{PREFIX}-{dead.pid}-1" not in list_namespaces()


def test_without_root_a_cut_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root; this is user 1000"), open_net():
        pass


@pytest.fixture
def two_ranks(fleet: Fleet) -> Fleet:
    """The fleet, with island 1 under the launcher of ranks: two, which sleep."""
    stop([fleet.islands[1]])
    command = island_command(
        2, ["-n", "1", "-r", "1", "import time; time.sleep(600)"], module="timeit"
    )
    fleet.islands[1] = start("island-1", command, fleet.run_dir / "island-1" / "log.txt")
    fleet.started.append(fleet.islands[1])
    wait_until(lambda: bool(find_process(fleet.islands[1], "rank1")), "the start of the ranks")
    return fleet


def test_one_rank_is_killed_and_its_launcher_ends_the_island(two_ranks):
    injector, island = (
        make_injector(two_ranks, "kill:1@round=0,process=rank1,back=0.1"),
        two_ranks.islands[1],
    )
    injector.poll()
    assert done(two_ranks) == ["killed rank1 of island-1"] and injector.ended_by_fault(island)
    wait_until(lambda: island.exit_code is not None, "the end of the island")
    assert island.exit_code == 137 and "rank 1 was ended by SIGKILL" in island.log.read_text()
    poll_until(injector, lambda: two_ranks.islands[1] is not island, "the return")
    assert done(two_ranks)[1:] == ["started island-1 again"]


def test_one_rank_is_frozen_and_woken(two_ranks):
    injector, island = (
        make_injector(two_ranks, "freeze:1@round=0,process=rank0,seconds=0.5"),
        two_ranks.islands[1],
    )
    injector.poll()
    wait_until(lambda: states(two_ranks, 1) >= {"T"}, "the stop of the rank")
    assert {pid for pid in find_processes([island]) if state(pid) == "T"} == find_process(
        island, "rank0"
    )
    poll_until(injector, lambda: not injector.is_down(1), "the end of the freeze")
    assert done(two_ranks) == ["froze rank0 of island-1 for 0.5 s", "woke island-1"]


def test_a_process_that_does_not_run_is_not_killed(two_ranks):
    injector = make_injector(two_ranks, "kill:1@round=0,process=daemon,back=0.1")
    injector.poll()
    assert done(two_ranks) == ["nothing was done: daemon is not running"]
    assert two_ranks.islands[1].exit_code is None and not injector.ended_by_fault(
        two_ranks.islands[1]
    )


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
