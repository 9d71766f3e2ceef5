"""Islands that read text while it is tokenised, or from a store: the same run, and nothing lost
with faults.
"""

import signal
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from diloco.records.environment import FILE
from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account
from diloco.runtime.operator_requests import STOP, make_request
from inner.data.streaming.open import shards_identity
from inner.data.streaming.publish import publish
from inner.data.streaming.store import Store
from tests.faults.waits import assert_one_history, more_rounds, reached, until
from tests.swarm import Swarm, swarm

SHARDS = ["data.order=shards", "data.shard_tokens=512"]
SHARD_BYTES = 2 * 513
AWAY = "AWAY"
"""A file in a store at away://, while which is there the store does not answer."""


class AwayFiles(LocalFileSystem):
    """Files at away://, a store that can be away. Islands are forked, so they have it, too."""

    protocol = "away"
    cachable = False

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        if (Path(path).parent / AWAY).exists():
            raise OSError("the store is away")
        return super().cat_file(path, start, end, **kwargs)


fsspec.register_implementation("away", AwayFiles, clobber=True)


def write_store(made: Swarm, url: str) -> None:
    """Prepare the text of a swarm into a store."""
    data = made.config.data.model_copy(
        update={"source": "files", "paths": [str(made.folder / "text")]}
    )
    publish(data, shards_identity(data), Store(url, 30), 1, lambda index, share: None)


def digests_of(folder: Path, *settings: str) -> list[str]:
    """The digests of a run of one island with three rounds."""
    with swarm(folder, *SHARDS, *settings, islands=[{}]) as made:
        if "data.source=shards" in settings:
            write_store(made, str(folder / "store"))
        (island,) = made.start_all()
        island.finish()
        return [record["digest"] for _, record in sorted(island.committed().items())]


def test_text_tokenised_in_the_run_before_it_or_read_from_a_store_gives_the_same_digests(
    tmp_path: Path,
) -> None:
    streamed = digests_of(tmp_path)
    assert len(streamed) == 3
    assert digests_of(tmp_path, "name=prepared") == streamed
    place = [f"data.paths=[{tmp_path / 'store'}]", f"island.cache_dir={tmp_path / 'fetched'}"]
    assert digests_of(tmp_path, "name=fetched", "data.source=shards", *place) == streamed


def test_an_island_gets_ready_while_its_text_is_written_and_says_what_it_waited_for_in_vain(
    tmp_path: Path,
) -> None:
    place = ["data.source=shards", f"data.paths=[{tmp_path / 'store'}]"]
    with swarm(tmp_path, *SHARDS, *place, "name=ready", islands=[{}]) as made:
        island = made.start(0)
        until((island.folder / FILE).exists, "its records", island)
        write_store(made, str(tmp_path / "store"))
        island.finish()
    place = [
        "data.source=shards",
        f"data.paths=[{tmp_path / 'nothing'}]",
        "island.shards.store_seconds=0.1",
    ]
    with swarm(tmp_path, *SHARDS, *place, "name=vain", islands=[{}]) as made:
        island = made.start(0)
        assert island.wait() == [1] and "it has had no index.json for" in island.log


def test_islands_read_a_store_with_a_kill_a_joiner_and_a_store_that_is_away_for_a_while(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    islands = [
        {"cache_dir": str(tmp_path / f"cache-{i}"), "faults": [f"slow:{i}x3"]} for i in range(3)
    ]
    islands[2]["joins"] = True  # pyright: ignore
    place = [
        "data.source=shards",
        f"data.paths=[away://{store}]",
        f"island.shards.cache_gb={5 * SHARD_BYTES / 1e9}",
    ]
    common = ["outer.rounds=100000", "outer.start_islands=2", "name=run", *SHARDS, *place]
    with swarm(tmp_path, *common, islands=islands) as made:
        write_store(made, str(store))
        first, second = made.start(0), made.start(1)
        reached(first, 2)
        joiner = made.start(2)
        (store / AWAY).touch()
        second.signal(signal.SIGKILL)
        second.wait()
        again = made.start(1)
        (store / AWAY).unlink()
        more_rounds(first, 3, ["island-0", "island-1", "island-2"])
        assert (
            0
            < sum(p.stat().st_size for p in (tmp_path / "cache-0").glob("shards/*/[0-9]*.bin"))
            <= 5 * SHARD_BYTES
        )
        make_request(tmp_path / "run", STOP)
        for island in (first, again, joiner):
            island.finish()
        assert_one_history(first, second, joiner)
    assert data_account(read_run(tmp_path / "run").islands)["units_repeated"] == 0
