"""The limit of open files, and sockets of large islands."""

import json
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from diloco.doctor.machine_checks import check_open_files, count_needed_files
from diloco.runtime import process_group
from outer.transports.gloo.open_files import MAX_FILES
from tests.swarm import swarm

ROOT = Path(__file__).parents[3]


def test_a_process_raises_its_limit_as_far_as_it_may() -> None:
    program = """
import resource
from outer.transports.gloo.open_files import allow_many_files
allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, allowed))
print(allow_many_files(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = MAX_FILES if allowed == resource.RLIM_INFINITY else min(allowed, MAX_FILES)
    assert ended.stdout.strip() == f"{limit} {(limit, allowed)}"


def test_the_doctor_warns_of_a_limit_that_the_ranks_may_reach() -> None:
    assert check_open_files(8).level == "ok"
    check = check_open_files(1 << 20)
    assert (
        check.level == "warning"
        and str(count_needed_files(1 << 20)) in check.text
        and "ulimit" in check.text
    )


def open_groups_of_a_large_island(config, index) -> None:
    """As for an island of LAZY_RANKS ranks, with four."""
    process_group.LAZY_RANKS = 4
    island, before = config.for_island(index), count_sockets()
    with process_group.open_process_group(island, "cpu") as ranks:
        opened = count_sockets() - before
        total = torch.tensor(float(ranks.rank))
        dist.all_reduce(total)
        found = {"sockets": opened, "sum": total.item(), "gathered": ranks.gather(ranks.rank)}
        if ranks.is_leader:
            folder = Path(island.run_dir) / config.name / island.label
            (folder / "found.json").write_text(json.dumps(found))
        # Twice: a rank that ends while another one still connects to it for the first would reset
        # the connection.
        dist.barrier()
        dist.barrier()


def count_sockets() -> int:
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return found


def test_ranks_of_a_large_island_connect_when_they_talk(tmp_path: Path) -> None:
    with swarm(tmp_path, islands=[{"ranks": 4}]) as islands:
        island = islands.start(0, open_groups_of_a_large_island)
        assert island.wait() == [0] * 4, island.log
        found = json.loads((island.folder / "found.json").read_text())
    assert (found["sum"], found["gathered"]) == (6.0, [0, 1, 2, 3])
    assert found["sockets"] < 12, (
        "three groups, each with a listener and a socket for each of three other ranks"
    )
