"""`diloco simulate --link` as a user runs it: real islands behind shaped links. Needs root."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.network_emulation.namespaces import PREFIX
from tests.swarm import TEXT, TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("nft") is None, reason="a NAT needs nft")
def test_an_island_behind_a_nat_trains_with_the_others_by_a_relay(tmp_path: Path):
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = [
        sys.executable,
        "-m",
        "diloco",
        "simulate",
        str(tmp_path / "tiny.yaml"),
        "outer.transport=tls",
    ]
    command += [
        "--islands",
        "3",
        "--nat",
        "1",
        "--nat",
        "2",
        "--link",
        "50mbit",
        "name=hidden",
        "outer.rounds=4",
    ]
    command += ["--fault", "kill:1@round=2,back=1"]
    command += [
        f"data.paths=[{tmp_path / 'text'}]",
        f"island.run_dir={tmp_path}",
        f"island.cache_dir={tmp_path}/cache",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as started:
        printed, _ = started.communicate(timeout=280)
    assert started.returncode == 0, printed
    summary = json.loads((tmp_path / "hidden" / "summary.json").read_text())
    assert summary["rounds_committed"] == 4 and summary["digests_equal"]


@pytest.mark.parametrize("transport", ["gloo", "tls", "hivemind"])
def test_a_run_behind_links_commits_and_reports_what_its_interfaces_counted(
    tmp_path: Path, transport: str
):
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = [
        sys.executable,
        "-m",
        "diloco",
        "simulate",
        str(tmp_path / "tiny.yaml"),
        f"outer.transport={transport}",
    ]
    command += [
        "--islands",
        "3",
        "--link",
        "20mbit,rtt=40ms",
        "--link",
        "1:10mbit",
        "name=linked",
        "outer.rounds=3",
    ]
    command += [
        f"data.paths=[{tmp_path / 'text'}]",
        f"island.run_dir={tmp_path}",
        f"island.cache_dir={tmp_path}/cache",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as started:
        printed, _ = started.communicate(timeout=280)
    assert started.returncode == 0, printed
    summary = json.loads((tmp_path / "linked" / "summary.json").read_text())
    assert summary["rounds_committed"] == 3 and summary["digests_equal"]
    assert summary["links"] == "20mbit,rtt=40ms 1:10mbit" and summary["links"] in printed
    for island, counted in summary["bytes_sent"].items():
        assert counted < summary["wire_bytes_sent"][island], (
            "headers and control messages come on top"
        )
        assert summary["bytes_received"][island] < summary["wire_bytes_received"][island]
    report = (tmp_path / "linked" / "report.html").read_text()
    assert "Sent between islands" in report and "On the wire, headers and all" in report
    left = subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True
    ).stdout
    assert f"{PREFIX}-{started.pid}-" not in left
