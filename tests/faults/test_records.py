"""What keeps records from being written costs the records: islands train to the end, to the same
state.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco import island
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.train import train
from tests.swarm import swarm

RECORDS = ("environment.json", "start.json", "metrics.jsonl")
# hivemind, where it is imported, calls a warning WARN.
PROBLEM = re.compile(r"^\S+ \S+ island-\d/0 (?:WARN|WARNING|ERROR) (.*)$", re.MULTILINE)


def train_pair(folder: Path, disk: Path) -> tuple[set[str], list[list[str]]]:
    """Digests at the end of two islands of one rank, and the warnings and errors of each.

    They keep everything but their logs, which lie in `folder`, on a disk.
    """

    def work(config: Config, index: int) -> str:
        found: list[str] = []

        def loop(runtime: Runtime) -> None:
            island.run(runtime)
            found.append(runtime.outer.digest)

        own = config.island.model_copy(update={"run_dir": str(disk)})
        train(config.model_copy(update={"island": own}), index, loop)
        return found[0]

    with swarm(folder, islands=[{}, {}]) as place:
        pair = [place.start(index, work) for index in (0, 1)]
        for one in pair:
            one.finish()
        return {one.result() for one in pair}, [PROBLEM.findall(one.log) for one in pair]


def test_islands_whose_records_cannot_be_written_train_on(tmp_path: Path) -> None:
    expected, _ = train_pair(tmp_path / "first", tmp_path / "good")
    disk = tmp_path / "bad"
    for name in (
        "LOGBOOK.md",
        "config.yaml",
        *(f"island-{k}/{name}" for k in (0, 1) for name in RECORDS),
    ):
        (disk / "test" / name).mkdir(parents=True)
    digests, said = train_pair(tmp_path / "second", disk)
    assert digests == expected and len(digests) == 1
    for name in ("LOGBOOK.md", "config.yaml", *RECORDS):
        assert [sum(name in line for line in lines) for lines in said] == [1, 1], (name, said)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    continue
            except OSError:
                continue


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_islands_that_are_started_again_on_a_full_or_read_only_disk_train_to_the_end(
    tmp_path: Path, disk: Path, how: str
) -> None:
    expected, _ = train_pair(tmp_path / "first", disk)
    if how == "full":
        fill(disk)
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    digests, said = train_pair(tmp_path / "second", disk)
    assert digests == expected and len(digests) == 1
    for name in RECORDS:
        assert [sum(name in line for line in lines) for lines in said] == [1, 1], (name, said)
