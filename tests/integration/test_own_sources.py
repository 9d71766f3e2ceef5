"""Data that may not leave a site: a source that one island reads, in a run of two."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.island import run as live
from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account
from diloco.report.summary import summarise_records
from diloco.train import train
from tests.swarm import TEXT, TINY, kill_in_step, swarm

ROOT = Path(__file__).parents[2]
MARKER = " ".join(["patient", "4711", "has", "been", "discharged"])
"""In pieces, because a run keeps uncommitted changes of this file beside its records
(code.diff).
"""
SETTINGS = ["outer.rounds=4", "outer.quorum=2", "outer.delay=1", "island.checkpoint.every_rounds=1"]


def sited(folder: Path) -> tuple[list[str], list[dict]]:
    """Settings of a mixture in which `clinic` is for island-0 only, and what differs between the
    islands.
    """
    for name, text in (("shared", TEXT), ("clinic", f"{MARKER}\n" * 8)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(60):
            (folder / name / f"{number}.txt").write_text(f"# {name} {number}\n" + text * 4)
    shared = {"name": "shared", "weight": 3, "source": "files", "paths": [str(folder / "shared")]}
    clinic = {
        "name": "clinic",
        "weight": 1,
        "source": "files",
        "paths": ["clinic"],
        "only": ["island-0"],
    }
    own = [
        "data.source=python-stdlib",
        "data.paths=[]",
        f"data.mixture={json.dumps([shared, clinic])}",
    ]
    here = {
        "cache_dir": str(folder / "cache-0"),
        "mixture_paths": {"clinic": [str(folder / "clinic")]},
    }
    return [*SETTINGS, *own], [here, {"cache_dir": str(folder / "cache-1")}]


def die_after(steps: int, config: Config, index: int) -> None:
    def killed(parts: Runtime) -> None:
        kill_in_step(steps, parts)
        live(parts)

    train(config, index, killed)


def holds_marker(folder: Path) -> bool:
    """Whether a file holds the text, as it is or as tokens."""
    text = MARKER.encode()
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16).tobytes()
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return any(text in file or tokens in file for file in files)


def test_a_source_of_one_island_stays_there_in_its_share_and_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    settings, islands = sited(tmp_path)
    with swarm(tmp_path / "whole", *settings, islands=islands) as made:
        first, second = made.run_all()
        read = [step["source_tokens"] for step in first.records("step")]
        assert sum(tokens["clinic"] for tokens in read) == 8 * 512 // 4
        assert all(step["source_tokens"] == {} for step in second.records("step")), (
            "one source only"
        )
        assert first.records("eval")[-1]["source_losses"].keys() == {"shared", "clinic"}
        assert first.records("eval")[-1]["loss"] == pytest.approx(
            second.records("eval")[-1]["loss"], rel=1e-5
        )
        run = read_run(first.folder.parent)
        assert data_account(run.islands)["units_repeated"] == 0
        assert summarise_records(run)["final_source_losses"].keys() == {"shared", "clinic"}
        last = first.committed()[3]["digest"]
        assert holds_marker(tmp_path / "cache-0"), "the test would see it"
        assert not holds_marker(tmp_path / "cache-1") and not holds_marker(second.folder)
    with swarm(tmp_path / "broken", *settings, islands=islands) as made:
        for island in made.start_all(lambda config, index: die_after(6, config, index)):
            assert island.wait() == [-signal.SIGKILL]
        again = made.run_all()
        assert again[0].events("resumed") and again[0].committed()[3]["digest"] == last


def test_prepare_leaves_out_what_is_not_for_the_island(tmp_path: Path) -> None:
    settings, _ = sited(tmp_path)
    (tmp_path / "run.yaml").write_text(TINY)
    places = [
        f"island.mixture_paths={{clinic: [{tmp_path}/clinic]}}",
        f"island.cache_dir={tmp_path}/cache",
    ]
    command = [
        sys.executable,
        "-m",
        "diloco",
        "prepare",
        str(tmp_path / "run.yaml"),
        *settings,
        *places,
    ]
    done = subprocess.run(
        [*command, "island.index=1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "clinic: left out, it is for island-0 only" in done.stdout
    assert not holds_marker(tmp_path / "cache")
    refused = [*command, "island.index=0", "--into", str(tmp_path / "store")]
    done = subprocess.run(refused, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "--into: clinic is for island-0 only" in done.stderr
    assert not (tmp_path / "store").exists()
