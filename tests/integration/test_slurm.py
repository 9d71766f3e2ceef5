"""Islands as jobs of a real SLURM cluster of four nodes, started by scripts/launch/slurm.sh. Needs
root and SLURM.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco.swarm.bootstrap import PREFIX
from diloco.watchdog.signals import end_with_parent
from tests.faults.waits import assert_one_history
from tests.integration.slurm_cluster import MISSING, Cluster, eventually, slurm_cluster
from tests.swarm import TEXT, TINY, Island

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0, reason="the nodes' namespaces need root"),
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge util-linux"
    ),
]
ROOT = Path(__file__).parents[2]
BOTH = ["island-0", "island-1"]


@dataclass
class Jobs:
    """Two islands of a run, each a job: island 0 on one node, island 1 on two with one rank
    each.
    """

    cluster: Cluster
    numbers: list[str]
    folder: Path

    @property
    def islands(self) -> list[Island]:
        return [Island(self.folder / name, []) for name in BOTH]

    def wait_for_rounds(self, count: int, participants: list[str]) -> None:
        """Wait until island 0 has committed so many rounds more with just these islands."""
        before = max(self.islands[0].committed(), default=-1)

        def have_come() -> bool:
            rounds = self.islands[0].committed().items()
            return (
                sum(r["participants"] == participants for number, r in rounds if number > before)
                >= count
            )

        self.wait(have_come, f"{count} rounds of {participants}")

    def wait_for_end(self) -> None:
        """Wait until both jobs have completed."""

        def are_done() -> bool:
            return all(
                self.cluster.job(number)["JobState"] == "COMPLETED" for number in self.numbers
            )

        self.wait(are_done, "the end of both jobs")

    def wait_until_running_again(self, number: str) -> None:
        """Wait until the job, which has ended, runs again."""
        self.wait(lambda: self.cluster.runs_again(number), f"job {number} running again")

    def wait(self, is_so, what: str) -> None:
        eventually(
            is_so, what, *(self.folder.with_suffix(f".{number}.out") for number in self.numbers)
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "cluster").mkdir()
    with slurm_cluster(tmp_path / "cluster", 4) as made:
        yield made


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "diloco",
        "bootstrap",
        "--rendezvous",
        "tcp",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    command += ["--folder", str(tmp_path / "rendezvous")]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=end_with_parent
    ) as process:
        assert process.stdout is not None
        yield (
            next(line for line in process.stdout if line.startswith(PREFIX))
            .removeprefix(PREFIX)
            .strip()
        )
        process.kill()


def submit(cluster: Cluster, rendezvous: str, folder: Path, name: str, *settings: str) -> Jobs:
    """Write the run's text and config, and submit its two jobs."""
    (folder / "text").mkdir(exist_ok=True)
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
    (folder / "run.yaml").write_text(TINY)
    words = [
        f"name={name}",
        f"data.paths=[{folder / 'text'}]",
        f"island.cache_dir={folder / 'cache'}",
    ]
    words += [
        "outer.transport=tls",
        "outer.start_islands=2",
        "outer.inner_steps=4",
        "island.device=cpu",
    ]
    words += [
        "outer.wait_seconds=300",
        "island.checkpoint.every_rounds=1000",
        "evaluate.every_rounds=1000",
        *settings,
    ]
    env = {
        "DILOCO_CONFIG": str(folder / "run.yaml"),
        "DILOCO_BOOTSTRAP": rendezvous,
        "DILOCO_RUN_DIR": str(folder),
    }
    env["DILOCO_PYTHON"] = sys.executable
    numbers = []
    for index, nodes in enumerate((1, 2)):
        options = [
            "--parsable",
            f"--chdir={ROOT}",
            f"--output={folder}/{name}.%j.out",
            "--time=1:00:00",
        ]
        options += [
            f"--nodes={nodes}",
            "--gpus-per-node=1",
            str(ROOT / "scripts" / "launch" / "slurm.sh"),
        ]
        numbers.append(cluster.command("sbatch", *options, *words, DILOCO_INDEX=str(index), **env))
    return Jobs(cluster, numbers, folder / name)


def test_a_warned_job_is_queued_again_and_ends_with_the_bits_of_a_run_never_stopped(
    cluster: Cluster, rendezvous: str, tmp_path: Path
) -> None:
    # Both islands are needed for a round, so island 0 waits for the job that is queued again.
    settings = ["outer.rounds=40", "outer.quorum=2"]
    jobs = submit(cluster, rendezvous, tmp_path, "stopped", *settings)
    jobs.wait_for_rounds(3, BOTH)
    cluster.command("scancel", "--batch", "--signal=USR2", jobs.numbers[1])
    jobs.wait(lambda: cluster.job(jobs.numbers[1])["JobState"] == "PENDING", "the job queued again")
    saved = jobs.islands[1].committed()
    jobs.wait_for_end()
    assert (
        cluster.job(jobs.numbers[1])["Restarts"] == "1"
        and cluster.job(jobs.numbers[0])["Restarts"] == "0"
    )
    assert len(jobs.islands[1].events("resumed")) == 1 and len(saved) < 40
    whole = submit(cluster, rendezvous, tmp_path, "whole", *settings)
    whole.wait_for_end()
    assert_one_history(*jobs.islands, *whole.islands)
    assert all(len(island.committed()) == 40 for island in [*jobs.islands, *whole.islands])


def test_a_job_whose_node_dies_is_queued_again_and_its_island_returns_on_other_nodes(
    cluster: Cluster, rendezvous: str, tmp_path: Path
) -> None:
    jobs = submit(cluster, rendezvous, tmp_path, "killed", "outer.rounds=100000")
    jobs.wait_for_rounds(3, BOTH)
    *_, last = cluster.nodes_of(jobs.numbers[1])
    cluster.kill(last)
    jobs.wait_for_rounds(3, ["island-0"])
    jobs.wait_until_running_again(jobs.numbers[1])
    jobs.wait_for_rounds(3, BOTH)
    nodes = cluster.nodes_of(jobs.numbers[1])
    assert len(nodes) == 2 and last not in nodes
    assert_one_history(*jobs.islands)


def test_the_island_of_a_cancelled_job_says_goodbye_and_the_other_goes_on(
    cluster: Cluster, rendezvous: str, tmp_path: Path
) -> None:
    jobs = submit(cluster, rendezvous, tmp_path, "cancelled", "outer.rounds=100000")
    jobs.wait_for_rounds(3, BOTH)
    cluster.command("scancel", jobs.numbers[1])
    jobs.wait_for_rounds(3, ["island-0"])
    jobs.wait(
        lambda: cluster.job(jobs.numbers[1])["JobState"] == "CANCELLED",
        "the end of the cancelled job",
    )
    assert jobs.islands[1].events("left")
