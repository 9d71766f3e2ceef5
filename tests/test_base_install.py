"""A base install: what trains, and what says that it needs more, where hivemind and other extras
are not installed.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.check import check_network
from diloco.config.schema import parse_config
from diloco.own_loop.run_config import read_config
from diloco.swarm.bootstrap import bootstrap
from outer.connect.meeting import find_runs
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.errors import InputError
from tests.bare_python import make_python_without
from tests.swarm import TEXT, TINY

ROOT = Path(__file__).parents[1]
ABSENT = {
    *(
        "hivemind",
        "datasets",
        "pyarrow",
        "transformers",
        "accelerate",
        "peft",
        "trl",
        "lightning_fabric",
    ),
    *("fastapi", "uvicorn", "httpx", "playwright", "wandb", "tensorboard", "s3fs", "boto3", "moto"),
}
"""What a bare machine may lack: extras, what only tests need, and a required package that is
imported when needed.
"""
IN_DHT = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBwgvuKTmfupyVkL18t78A1kTvu9HtfSfwbs1iUCnSVyL"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the packages of this one but ABSENT."""
    return make_python_without(ABSENT, tmp_path_factory.mktemp("bare"))


def run_in(bare: Path, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [str(bare), "-m", *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, timeout=280, capture_output=True, text=True
    )


@pytest.mark.parametrize("transport", ["tls", "gloo"])
def test_two_islands_train(bare: Path, tmp_path: Path, transport: str) -> None:
    # A folder of its own: what a run writes is no text for it to read.
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    (tmp_path / "run.yaml").write_text(TINY)
    places = [
        f"data.paths=[{text}]",
        f"island.run_dir={tmp_path}",
        f"island.cache_dir={tmp_path / 'cache'}",
    ]
    settings = [*places, f"outer.transport={transport}", "outer.rounds=2"]
    done = run_in(bare, "diloco", "simulate", "run.yaml", "--islands", "2", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    assert summary["digests_equal"] and summary["rounds_committed"] == 2
    assert "hivemind" not in (tmp_path / "test" / "LOGBOOK.md").read_text()


def test_all_tests_are_collected(bare: Path) -> None:
    done = run_in(bare, "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture
def no_hivemind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds no hivemind in this process."""
    monkeypatch.setitem(sys.modules, "hivemind", None)


def refused(instead: str) -> "pytest.RaisesExc[InputError]":
    return pytest.raises(
        InputError, match=rf"not installed here; pip install 'diloco\[hivemind\]', or {instead}"
    )


@pytest.mark.usefixtures("no_hivemind")
def test_a_run_over_hivemind_or_by_a_dht_is_refused_with_the_cure() -> None:
    config = parse_config(TINY, ["outer.transport=hivemind"])
    with refused("set outer.transport=tls"):
        check_network(config.run, config.island)
    config = parse_config(TINY, ["outer.transport=tls", f"island.bootstrap=[{IN_DHT}]"])
    with refused("let the islands meet at a rendezvous"):
        check_network(config.run, config.island)
    with refused("set outer.transport=tls"):
        read_config({"name": "own"}, ())


@pytest.mark.usefixtures("no_hivemind")
def test_a_network_that_needs_hivemind_is_not_opened() -> None:
    with refused("set outer.transport=tls"):
        asyncio.run(open_network("hivemind", NetworkSettings("run", "a", 0)))
    with refused("let the islands meet at a rendezvous"):
        asyncio.run(open_network("tls", NetworkSettings("run", "a", 0, [IN_DHT])))
    with refused("let the islands meet at a rendezvous"):
        asyncio.run(find_runs(IN_DHT, 1))


@pytest.mark.usefixtures("no_hivemind")
def test_commands_that_need_hivemind_say_so_before_anything_starts(tmp_path: Path) -> None:
    with refused("use --rendezvous tcp"):
        bootstrap("127.0.0.1", 0, "dht", None)
    with refused("let the islands meet at a rendezvous"):
        CliRunner().invoke(app, ["join", IN_DHT], catch_exceptions=False)
    (tmp_path / "run.yaml").write_text(TINY)
    launched = CliRunner().invoke(
        app, ["launch", str(tmp_path / "run.yaml"), "outer.transport=hivemind"]
    )
    assert launched.exit_code == 78 and "pip install 'diloco[hivemind]'" in launched.output
    with refused("set outer.transport=tls"):
        CliRunner().invoke(
            app,
            ["simulate", str(tmp_path / "run.yaml"), "outer.transport=hivemind"],
            catch_exceptions=False,
        )


@pytest.mark.usefixtures("no_hivemind")
def test_a_doctor_misses_hivemind_only_where_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TINY)
    places = [f"island.run_dir={tmp_path}", f"island.cache_dir={tmp_path}"]
    for transport, missed in (("hivemind", True), ("tls", False)):
        words = [
            "doctor",
            "--config",
            str(tmp_path / "run.yaml"),
            *places,
            f"outer.transport={transport}",
        ]
        said = CliRunner().invoke(app, words)
        assert ("pip install 'diloco[hivemind]'" in said.output) == missed, said.output
        assert said.exit_code == int(missed) and "Traceback" not in said.output
