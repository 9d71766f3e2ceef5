"""`diloco simulate --nodes` as a user runs it: islands of several nodes, each as a machine of its
own. Needs root.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.swarm import TEXT, TINY, read_records

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="a NAT needs nft")
ROOT = Path(__file__).parents[2]
LONG = ["outer.inner_steps=10", "island.checkpoint.every_rounds=1", "evaluate.every_rounds=100"]


def simulate(folder: Path, *words: str, seconds: float = 400.0) -> dict[str, Any]:
    """The summary of a run of islands of two nodes with one rank each. Fails with what was
    printed.
    """
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    (folder / "tiny.yaml").write_text(TINY)
    command = [
        sys.executable,
        "-m",
        "diloco",
        "simulate",
        str(folder / "tiny.yaml"),
        "--ranks",
        "2",
        "--nodes",
        "2",
    ]
    command += ["name=nodes", f"data.paths=[{folder / 'text'}]", f"island.run_dir={folder}", *words]
    command += [f"island.cache_dir={folder}/cache"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as started:
        printed, _ = started.communicate(timeout=seconds)
    assert started.returncode == 0, printed
    return json.loads((folder / "nodes" / "summary.json").read_text())


@needs_nft
def test_islands_of_two_nodes_one_behind_a_nat_and_a_joiner_hold_the_same_bits(tmp_path: Path):
    words = [
        "outer.transport=tls",
        "--islands",
        "2",
        "--nat",
        "1",
        "--link",
        "100mbit",
        "--fault",
        "join:@round=1",
    ]
    summary = simulate(tmp_path, *words, "outer.rounds=30", "outer.inner_steps=10")
    assert summary["rounds_committed"] == 30 and summary["digests_equal"]
    rounds = [
        r
        for r in read_records(tmp_path / "nodes" / "island-2" / "metrics.jsonl")
        if r["kind"] == "round"
    ]
    assert rounds[-1]["participants"] == ["island-0", "island-1", "island-2"]
    for island in (0, 1):
        assert (
            f"island-{island}/1"
            in (tmp_path / "nodes" / f"island-{island}" / "log.txt").read_text()
        )


@needs_nft
@pytest.mark.skipif(shutil.which("conntrack") is None, reason="a NAT that forgets needs conntrack")
@pytest.mark.timeout(1500)
def test_islands_behind_nat_and_proxy_and_a_joiner_stay_equal_while_nodes_and_relays_die(
    tmp_path: Path,
):
    faults = [
        "join:@round=2",
        "kill:relay0@round=8,back=3",
        "kill:0@round=16,node=1,back=1",
        "kill:relay1@round=50,back=3",
        "forget:0@round=70",
    ]
    words = [
        "outer.transport=tls",
        "--islands",
        "2",
        "--nat",
        "0",
        "--proxy",
        "1",
        "--link",
        "100mbit",
        *LONG,
    ]
    words += [
        "outer.rounds=100",
        "outer.wait_seconds=300",
        *(word for fault in faults for word in ("--fault", fault)),
    ]
    summary = simulate(tmp_path, *words, seconds=1400)
    assert summary["rounds_committed"] == 100 and summary["digests_equal"]
    run = tmp_path / "nodes"
    done = [json.loads(line)["spec"] for line in (run / "faults.jsonl").read_text().splitlines()]
    assert set(done) == set(faults)
    # Each island has come back from its fault, or joined, and was then in a round of all three.
    for island in range(3):
        rounds = [
            r
            for r in read_records(run / f"island-{island}" / "metrics.jsonl")
            if r["kind"] == "round"
        ]
        full = [r["round"] for r in rounds if r["committed"] and len(r["participants"]) == 3]
        assert full and max(full) > 16, island


@pytest.mark.parametrize("process", ["", "process=daemon,"], ids=["node", "daemon"])
def test_an_island_over_hivemind_whose_node_or_daemon_is_killed_comes_back(
    tmp_path: Path, process: str
) -> None:
    rounds = rounds_with_a_fault(
        tmp_path, f"kill:1@round=3,{process}node=1,back=1", "hivemind", num_rounds=200
    )
    both = [len(r["participants"]) == 2 for r in rounds if r["committed"]]
    assert both[0] and False in both and True in both[both.index(False) :], (
        "without it, and with it again"
    )


def rounds_with_a_fault(
    folder: Path, fault: str, transport: str = "tls", num_rounds: int = 60
) -> list[dict[str, Any]]:
    """Rounds of island 0 while a fault hits a node of island 1. All end with equal digests."""
    words = [
        f"outer.transport={transport}",
        "--islands",
        "2",
        "--link",
        "100mbit",
        "--fault",
        fault,
    ]
    words += [f"outer.rounds={num_rounds}", *LONG]
    summary = simulate(folder, *words)
    assert summary["digests_equal"] and summary["rounds_committed"] == num_rounds
    return [
        r
        for r in read_records(folder / "nodes" / "island-0" / "metrics.jsonl")
        if r["kind"] == "round"
    ]


@pytest.mark.parametrize("transport", ["tls", "gloo"])
@pytest.mark.parametrize("process", ["", "process=agent,"], ids=["node", "agent"])
def test_an_island_whose_node_is_killed_comes_back_and_the_other_goes_on(
    tmp_path: Path, process: str, transport: str
) -> None:
    rounds = rounds_with_a_fault(tmp_path, f"kill:1@round=3,{process}node=1,back=1", transport)
    both = [len(r["participants"]) == 2 for r in rounds if r["committed"]]
    assert both[0] and False in both and True in both[both.index(False) :], (
        "without it, and with it again"
    )


@pytest.mark.parametrize("kind", ["freeze", "cut"])
def test_an_island_whose_node_stands_still_for_a_while_is_late_and_loses_nothing(
    tmp_path: Path, kind: str
) -> None:
    rounds = rounds_with_a_fault(tmp_path, f"{kind}:1@round=3,node=1,seconds=12")
    assert all(r["committed"] and len(r["participants"]) == 2 for r in rounds)


@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_islands_of_two_nodes_meet(tmp_path: Path, transport: str):
    summary = simulate(
        tmp_path, f"outer.transport={transport}", "--islands", "2", "--link", "100mbit"
    )
    assert summary["rounds_committed"] == 3 and summary["digests_equal"]
