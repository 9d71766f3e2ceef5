"""`diloco simulate --nodes` as a user runs it: islands of several nodes, each as a machine of its own. Needs root."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.swarm import TEXT, TINY, read_records

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="a NAT needs nft")
ROOT = Path(__file__).parents[2]


def simulate(folder: Path, *words: str, seconds: float = 400.0) -> dict[str, Any]:
    """The summary of a run of islands of two nodes with one rank each. Fails with what was printed."""
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    (folder / "tiny.yaml").write_text(TINY)
    command = [sys.executable, "-m", "diloco", "simulate", str(folder / "tiny.yaml"), "--ranks", "2", "--nodes", "2"]
    command += ["name=nodes", f"data.paths=[{folder / 'text'}]", f"island.run_dir={folder}", *words]
    command += [f"island.cache_dir={folder}/cache"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as started:
        printed, _ = started.communicate(timeout=seconds)
    assert started.returncode == 0, printed
    return json.loads((folder / "nodes" / "summary.json").read_text())


@needs_nft
def test_islands_of_two_nodes_one_behind_a_nat_and_a_joiner_hold_the_same_bits(tmp_path: Path):
    words = ["outer.transport=tls", "--islands", "2", "--nat", "1", "--link", "100mbit", "--fault", "join:@round=1"]
    summary = simulate(tmp_path, *words, "outer.rounds=30", "outer.inner_steps=10")
    assert summary["rounds_committed"] == 30 and summary["digests_equal"]
    rounds = [r for r in read_records(tmp_path / "nodes" / "island-2" / "metrics.jsonl") if r["kind"] == "round"]
    assert rounds[-1]["participants"] == ["island-0", "island-1", "island-2"]
    for island in (0, 1):
        assert f"island-{island}/1" in (tmp_path / "nodes" / f"island-{island}" / "log.txt").read_text()


def test_islands_of_two_nodes_meet_over_gloo(tmp_path: Path):
    summary = simulate(tmp_path, "outer.transport=gloo", "--islands", "2", "--link", "100mbit")
    assert summary["rounds_committed"] == 3 and summary["digests_equal"]
