"""All islands of a run that reads text in shards end in the middle of it, and go on as if nothing
had been.

`pytest -m slow tests/integration/test_streaming_resume.py` has every way to read, both ways to end,
and other islands.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet

from diloco import island as life
from diloco.assemble import Runtime
from diloco.checkpoints.global_params import find_newest_checkpoint
from diloco.config.schema import Config
from diloco.records.run_folder import read_run
from diloco.report.data_account import distinct_commits, surviving_history, units_of
from diloco.train import train
from inner.data.streaming.index import INDEX
from outer.rounds.checkpoint import parse_facts
from tests.diloco.checkpoints.s3_server import BUCKET, s3_process
from tests.integration.test_resume import come_together
from tests.swarm import GUARD_SECONDS, TEXT, Swarm, Work, kill_in_step, swarm

ROOT = Path(__file__).parents[2]
SHARDS = ["data.order=shards", "data.shard_tokens=1024"]
SETTINGS = [*SHARDS, "island.checkpoint.every_rounds=1", "outer.rounds=6", "outer.inner_steps=4"]
URL = f"s3://{BUCKET}/text"
WAYS = ("tokenised", "prepared", "stored")
END_STEP = 14
"""The step of each island in which all end: in the middle of the fourth round."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    digests: dict[int, str]
    """Of each committed round."""
    units: list[int]
    """That these rounds have trained, with those that occur twice."""


def outcome_of(run_dir: Path) -> Outcome:
    committed = [
        record for island in read_run(run_dir).islands for record in distinct_commits(island.rounds)
    ]
    last = max(committed, key=lambda record: (record.trained_units, record.round))
    survived = surviving_history(committed, last)
    units = sorted(chain.from_iterable(map(units_of, survived)))
    assert len(units) == last.trained_units, "an island ended between a commit and its record"
    return Outcome({record.round: record.digest for record in survived}, units)


def ended_in_step(steps: int, number: int) -> Work:
    """Train until the process gets a signal in inner step `steps`, when all islands are in it."""

    def work(config: Config, index: int) -> None:
        def live(parts: Runtime) -> None:
            def end() -> None:
                come_together(Path(parts.island.run_dir), index, len(config.islands))
                if number != signal.SIGKILL:
                    os.kill(os.getpid(), number)
                    threading.Event().wait(GUARD_SECONDS)  # the handler ends the process

            kill_in_step(steps, parts, end)
            life.run(parts)

        train(config, index, live)

    return work


def prepare(folder: Path, *arguments: str) -> None:
    """Run `diloco prepare` on the text of a swarm."""
    path = folder / "text.yaml"
    path.write_text(
        f"data: {{source: files, paths: [{folder / 'text'}], seq_len: 32, heldout_fraction: 0.3}}\n"
    )
    command = [sys.executable, "-m", "diloco", "prepare", str(path), *SHARDS, *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=GUARD_SECONDS, stdout=subprocess.DEVNULL)


def shapes_of(folder: Path, way: str, num_islands: int) -> list[dict[str, Any]]:
    """Islands that have a cache each, or share the prepared one."""
    number = (
        dict.fromkeys(range(num_islands), 0)
        if way == "prepared"
        else {i: i for i in range(num_islands)}
    )
    return [{"cache_dir": str(folder / f"cache-{number[index]}")} for index in range(num_islands)]


@contextmanager
def text_read(way: str, folder: Path) -> Iterator[list[str]]:
    """The settings of a run in `folder` that reads its text in this way."""
    with ExitStack() as stack:
        # Its text is written by the first swarm there.
        with swarm(folder, islands=[{}]):
            pass
        if way == "prepared":
            prepare(folder, f"island.cache_dir={folder / 'cache-0'}")
        if way == "stored":
            stack.enter_context(s3_process())
            prepare(folder, "--into", URL)
        yield ["data.source=shards", f"data.paths=[{URL}]"] if way == "stored" else []


def start_and_end(made: Swarm, number: int) -> None:
    """Start all islands, and let them end by the signal."""
    for island in made.start_all(ended_in_step(END_STEP, number)):
        code = -number if number == signal.SIGKILL else 128 + number
        assert island.wait() == [code], island.log[-3000:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome of two islands that nothing happens to, which tokenise during the run."""
    folder = tmp_path_factory.mktemp("whole")
    with swarm(
        folder, *SETTINGS, "outer.quorum=2", islands=shapes_of(folder, "tokenised", 2)
    ) as made:
        made.run_all()
    found = outcome_of(folder / "test")
    assert found.units == sorted(set(found.units)) and len(found.digests) == 6
    return found


@pytest.mark.parametrize(
    "way, number",
    [
        pytest.param("tokenised", signal.SIGKILL),
        pytest.param("tokenised", signal.SIGTERM, marks=pytest.mark.slow),
        *(
            pytest.param(way, number, marks=pytest.mark.slow)
            for way in WAYS[1:]
            for number in (signal.SIGKILL, signal.SIGTERM)
        ),
    ],
)
def test_islands_that_all_ended_go_on_to_the_digests_of_a_run_that_did_not(
    tmp_path: Path, whole: Outcome, way: str, number: int
) -> None:
    with text_read(way, tmp_path) as settings:
        shapes = shapes_of(tmp_path, way, 2)
        with swarm(tmp_path, *SETTINGS, *settings, "outer.quorum=2", islands=shapes) as made:
            start_and_end(made, number)
            for island in made.run_all():
                assert island.events("resumed")
    assert outcome_of(tmp_path / "test") == whole


def check_account(run_dir: Path, names: Sequence[str]) -> None:
    """Check that the run ended with no unit read twice, and none lost: what is not trained is still
    to be read.
    """
    newest = [find_newest_checkpoint(run_dir, name) for name in names]
    facts = [parse_facts(one.facts["outer"]) for one in newest]
    assert len({one.digest for one in facts}) == 1
    ledger = facts[0].position.ledger
    leased = chain.from_iterable(lease.runs for lease in ledger.leases.values())
    still = sorted(chain.from_iterable([*ledger.returned, *leased]))
    trained = outcome_of(run_dir).units
    assert sorted([*trained, *still]) == list(range(ledger.frontier))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before, after", [(2, 3), (3, 1)])
def test_another_number_of_islands_goes_on_with_a_new_one(
    tmp_path: Path, way: str, before: int, after: int
) -> None:
    with text_read(way, tmp_path) as settings:
        common = [*SETTINGS, *settings, "outer.start_islands=2"]
        with swarm(
            tmp_path, *common, f"outer.quorum={before}", islands=shapes_of(tmp_path, way, before)
        ) as made:
            start_and_end(made, signal.SIGKILL)
        # The new one has read nothing yet, and comes when the others go on.
        more = [*common, "outer.rounds=14", f"outer.quorum={after}"]
        with swarm(tmp_path, *more, islands=shapes_of(tmp_path, way, after)) as made:
            islands = made.run_all()
            assert [bool(island.events("resumed")) for island in islands] == [
                i < before for i in range(after)
            ]
            assert islands[-1].committed()[13]["participants"] == [
                f"island-{i}" for i in range(after)
            ]
    check_account(tmp_path / "test", [f"island-{i}" for i in range(after)])


NUM_FILES, NUM_ROWS = 6, 60


def write_dataset(folder: Path) -> None:
    folder.mkdir()
    for number in range(NUM_FILES):
        rows = [{"text": f"# {number} {row}\n{TEXT}"} for row in range(NUM_ROWS)]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), folder / f"train-{number}.parquet"
        )


def break_rows(path: Path) -> None:
    """Damage the rows of a Parquet file, but not its schema, size or time, by which the text is
    known.
    """
    stat = path.stat()
    with path.open("r+b") as file:
        file.write(b"x" * 64)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.slow
def test_a_stream_of_a_dataset_goes_on_without_the_files_that_were_read(tmp_path: Path) -> None:
    place = [
        "data.source=huggingface",
        f"data.dataset={tmp_path / 'mine'}",
        "data.paths=[]",
        "data.max_tokens=200000",
    ]
    write_dataset(tmp_path / "mine")
    outcomes = []
    for name in ("whole", "broken"):
        folder = tmp_path / name
        with swarm(
            folder, *SETTINGS, *place, "outer.quorum=2", islands=shapes_of(folder, "tokenised", 2)
        ) as made:
            if name == "broken":
                start_and_end(made, signal.SIGKILL)
                for cache in folder.glob("cache-*"):
                    (index,) = cache.glob(f"shards/*/{INDEX}")
                    assert '"place":[' in index.read_text()
                break_rows(tmp_path / "mine" / "train-0.parquet")
            made.run_all()
        outcomes.append(outcome_of(folder / "test"))
    assert outcomes[0] == outcomes[1]
