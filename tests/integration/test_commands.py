"""The commands as a user runs them: real processes from the command line, real text, hivemind
between islands.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from diloco.errors import FINAL_STATUS
from outer.membership.rendezvous import serve_rendezvous
from tests.sockets import beyond_loopback, marked, watch_sockets
from tests.swarm import TEXT, TINY, read_records, swarm

DILOCO = [sys.executable, "-m", "diloco"]
ROOT = Path(__file__).parents[2]
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWQPXzEUeN2gmTB2opo4dXyZHR9H4AAZhxNfKWJ5Cv6jKq"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("gloo", "hivemind"))
    return path


def own(tmp_path: Path) -> list[str]:
    """Overrides that keep a run inside the test's folder."""
    folders = {"run_dir": tmp_path / "runs", "cache_dir": tmp_path / "cache"}
    return [
        f"data.paths=[{tmp_path / 'text'}]",
        *(f"island.{key}={path}" for key, path in folders.items()),
    ]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DILOCO, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )


def descendants_of(marker: str) -> list[str]:
    """Command lines of all processes that contain `marker`, and of libp2p daemons started by this
    process.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if marker in line:
                found.append(line)
    return found


def wait_until(condition, what: str, timeout_seconds: float = 200) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.05)


def committed(folder: Path) -> dict[int, dict]:
    records = read_records(folder / "metrics.jsonl")
    return {r["round"]: r for r in records if r["kind"] == "round" and r["committed"]}


@pytest.mark.parametrize("rendezvous", ["tcp", "dht"])
def test_a_bootstrap_outlives_the_shell_that_started_it_until_it_is_told_to_stop(
    tmp_path, rendezvous
):
    log = tmp_path / "log.txt"
    command = shlex.join([*DILOCO, "bootstrap", "--rendezvous", rendezvous])
    # The shell ends once the process serves.
    script = f"{command} > {log} 2>&1 & echo $!; until grep -q address: {log}; do sleep 0.1; done"
    shell = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    pid = int(shell.stdout)

    def is_running() -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    try:
        time.sleep(1.0)
        assert is_running(), "it has ended with its shell"
        os.kill(pid, signal.SIGHUP)  # As at the end of a terminal.
        time.sleep(0.5)
        assert is_running(), "it has ended with its terminal"
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_running(), "the end that was asked for")
    finally:
        if is_running():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_joiner_that_nobody_gives_a_state_is_refused_once_and_not_started_again(config, tmp_path):
    rendezvous = serve_rendezvous("127.0.0.1", 0)
    try:
        place = [
            "outer.transport=gloo",
            "island.joins=true",
            f"island.bootstrap=[{rendezvous.address}]",
        ]
        done = run("launch", str(config), *own(tmp_path), *place)
    finally:
        rendezvous.close()
    assert done.returncode == FINAL_STATUS, done.stderr
    assert done.stderr.count("error: this island joins a run, but finds no island") == 1


def test_simulate_trains_islands_and_a_baseline_on_loopback_only_and_writes_the_report(
    config, tmp_path
):
    # One process an island; the baseline is one island of two.
    command = [
        *DILOCO,
        "simulate",
        str(config),
        "--islands",
        "2",
        "--ranks",
        "1",
        "--baseline",
        *own(tmp_path),
    ]
    command += [
        "outer.optimizer={lr: 1.0, momentum: 0.0, nesterov: false}"
    ]  # In three rounds momentum runs ahead.
    with (tmp_path / "log.txt").open("w") as log:
        done = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | marked(tmp_path)
        )
        listeners = watch_sockets(tmp_path, lambda: done.poll() is not None)
    assert done.returncode == 0, (tmp_path / "log.txt").read_text()
    assert len({each.pid for each in listeners}) >= 4 and beyond_loopback(listeners) == []
    wait_until(lambda: not descendants_of(str(tmp_path)), "the end of every process")
    folder = tmp_path / "runs" / "test"
    summary = json.loads((folder / "summary.json").read_text())
    assert (
        summary["rounds_committed"] == 3
        and summary["rounds_aborted"] == 0
        and summary["digests_equal"]
    )
    assert summary["tokens"] == summary["baseline"]["tokens"] == 2 * 3 * 2 * 512
    assert summary["final_eval_loss"] == pytest.approx(
        summary["baseline"]["final_eval_loss"], rel=0.2
    )
    assert sorted(summary["bytes_sent"]) == ["island-0", "island-1"]
    assert (folder / "report.html").exists() and (folder / "config.yaml").exists()
    assert run("report", str(folder)).returncode == 0


@pytest.mark.slow
def test_ctrl_c_ends_a_simulation_and_leaves_nothing_behind(config, tmp_path):
    arguments = [
        "simulate",
        str(config),
        "--islands",
        "2",
        "--ranks",
        "2",
        "outer.rounds=5000",
        *own(tmp_path),
    ]
    with subprocess.Popen(
        [*DILOCO, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        folder = tmp_path / "runs" / "test"
        wait_until(lambda: committed(folder / "island-1"), "a first commit")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    wait_until(lambda: not descendants_of(str(tmp_path)), "the end of every process")
    for island in ("island-0", "island-1"):
        lines = (folder / island / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["kind"], "every line is whole"
    assert not list(folder.rglob("*.tmp*"))


@pytest.mark.slow
def test_join_needs_the_address_alone(config, tmp_path):
    log = (tmp_path / "bootstrap.txt").open("w+")
    with subprocess.Popen([*DILOCO, "bootstrap"], cwd=ROOT, stdout=log) as bootstrap:
        try:
            wait_until(
                lambda: "address: " in (tmp_path / "bootstrap.txt").read_text(),
                "the bootstrap's address",
            )
            address = (
                (tmp_path / "bootstrap.txt").read_text().splitlines()[0].removeprefix("address: ")
            )
            join_and_compare(tmp_path, address)
        finally:
            bootstrap.terminate()


def join_and_compare(tmp_path: Path, address: str) -> None:
    settings = ["outer.transport=hivemind", "outer.rounds=5000", f"island.bootstrap=[{address}]"]
    folder = tmp_path / "joined" / "test" / "island-1"
    with swarm(tmp_path / "swarm", *settings, islands=[{"ranks": 1}]) as islands:
        first = islands.start(0)
        first.wait_for_round(1)
        folders = [
            f"island.run_dir={tmp_path / 'joined'}",
            f"island.cache_dir={tmp_path / 'cache'}",
        ]
        folders += [f"island.data_paths=[{tmp_path / 'swarm' / 'text'}]"]
        with subprocess.Popen(
            [*DILOCO, "join", address, "--ranks", "2", *folders], cwd=ROOT
        ) as joiner:
            wait_until(lambda: len(committed(folder)) >= 3, "three commits of the joiner")
            joiner.terminate()
        shared = committed(folder)
        first.wait_for_round(max(shared))
        assert min(shared) >= 2, "it began from the island's state"
        assert all(
            record["digest"] == first.committed()[number]["digest"]
            for number, record in shared.items()
        )


@pytest.mark.slow
def test_join_of_an_address_that_nobody_answers_says_what_was_tried(tmp_path):
    done = run("join", NOBODY)
    assert done.returncode == 2
    assert NOBODY in done.stderr and "none of these addresses answered within" in done.stderr
    assert "Traceback" not in done.stderr


def test_join_takes_the_islands_own_values_only():
    done = run("join", NOBODY, "outer.codec=int8")
    assert done.returncode == 2 and "may only set island.key=value" in done.stderr


def test_simulating_islands_over_loopback_is_refused_with_a_cure(config, tmp_path):
    done = run(
        "simulate", str(config), "--islands", "2", "outer.transport=loopback", *own(tmp_path)
    )
    assert done.returncode == 2 and "outer.transport=gloo" in done.stderr


def test_a_source_that_is_not_there_is_an_error_before_any_process_starts(config, tmp_path):
    done = run("simulate", str(config), *own(tmp_path), "data.paths=[/nowhere/at/all]")
    assert done.returncode == 2 and "/nowhere/at/all" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_unknown_preset_lists_the_choices(config, tmp_path):
    done = run("simulate", str(config), *own(tmp_path), "model={preset: 2m}")
    assert done.returncode == 2 and "2m" in done.stderr and "150m" in done.stderr


def test_a_wrong_number_of_processes_says_how_many_to_start(config, tmp_path):
    done = run("train", str(config), *own(tmp_path), "island.ranks=2", "outer.transport=loopback")
    assert (
        done.returncode == FINAL_STATUS
        and "island.ranks is 2, but 1 processes were started" in done.stderr
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="it asks for a device that is not there")
def test_an_island_whose_config_cannot_work_is_not_started_again(config, tmp_path):
    done = run(
        "launch",
        str(config),
        *own(tmp_path),
        "island.ranks=2",
        "island.device=cuda",
        "outer.transport=loopback",
    )
    assert done.returncode == FINAL_STATUS and "island.device is 'cuda'" in done.stderr
    assert "starting all ranks again" not in done.stderr


def test_a_report_of_a_folder_without_a_run_names_it(tmp_path):
    done = run("report", str(tmp_path))
    assert done.returncode == 2 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr


def test_config_prints_every_value_and_the_hash(config):
    done = run("config", str(config), "outer.codec=int8")
    assert done.returncode == 0
    assert "codec: int8" in done.stdout and done.stdout.startswith("# hash of the run's part: ")
