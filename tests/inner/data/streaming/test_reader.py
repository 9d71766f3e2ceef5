"""The three ways to read a text in shards give the same sequences, from any place on, within
limits.
"""

import fcntl
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import IO, Any

import pytest
import torch

from inner.data.batches import IslandBatches
from inner.data.corpus import prepare_corpus
from inner.data.mixture import READING_ORDER
from inner.data.stages import StageStart
from inner.data.streaming.cache import ShardCache
from inner.data.streaming.index import INDEX
from inner.data.streaming.open import FOLDER
from inner.errors import InputError
from tests.inner.data.streaming.texts import (
    SEQ_LEN,
    SHARD_TOKENS,
    batches_of,
    opened,
    published,
    read_units,
    rows_config,
    store_config,
    write_rows,
)

UNITS = range(150)
"""More than two epochs of the text, which has about 60 units."""
SHARD_BYTES = 2 * (SHARD_TOKENS + 1)


def shard_bytes(cache: Path) -> int:
    total = 0
    for path in (cache / FOLDER).glob("*/[0-9]*.bin"):
        with suppress(FileNotFoundError):  # it may make room for another at this moment
            total += path.stat().st_size
    return total


def test_tokenised_in_the_run_prepared_and_read_from_a_store_the_sequences_are_equal(
    tmp_path: Path,
) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    with opened(config, tmp_path / "streamed") as corpus:
        streamed = read_units(corpus, UNITS)
    published(config, str(tmp_path / "store"))
    with opened(store_config(str(tmp_path / "store")), tmp_path / "fetched") as corpus:
        assert torch.equal(read_units(corpus, UNITS), streamed)
    with opened(config, tmp_path / "streamed") as corpus:
        assert torch.equal(read_units(corpus, UNITS), streamed)


def test_an_epoch_reads_each_sequence_once_shard_by_shard(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    train = prepare_corpus(config, tmp_path / "cache").texts[0].train
    number, per_shard = (len(train) - 1) // SEQ_LEN, SHARD_TOKENS // SEQ_LEN
    wanted = [train[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].tolist() for i in range(number)]  # pyright: ignore
    with opened(config, tmp_path / "cache") as corpus:
        found = read_units(corpus, range(-(-2 * number // 8))).tolist()
    for epoch in (found[:number], found[number : 2 * number]):
        for first in range(0, number, per_shard):
            assert sorted(epoch[first : first + per_shard]) == sorted(
                wanted[first : first + per_shard]
            )
    assert (
        found[:per_shard] != wanted[:per_shard]
        and found[:per_shard] != found[number : number + per_shard]
    )


@pytest.mark.parametrize(
    "start", [StageStart(), StageStart(unit=3, blocks=(5,), block_len=2 * SEQ_LEN)]
)
def test_tokens_that_are_all_here_are_read_in_the_same_order_in_stages_too(
    tmp_path: Path, start: StageStart
) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    whole = replace(prepare_corpus(config, tmp_path / "cache"), shuffled_tokens=SHARD_TOKENS)
    with opened(config, tmp_path / "cache") as corpus:
        for unit in range(start.unit, 70):
            found = [IslandBatches(each, SEQ_LEN, 0, 1, 8, start) for each in (corpus, whole)]
            first, second = (batches.micro_batches(unit, 0, 1, 8)[0] for batches in found)
            assert torch.equal(first, second)


def test_a_restart_reads_on_from_its_place(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    with opened(config, tmp_path / "cache") as corpus:
        whole = read_units(corpus, range(60))
    for shard in (tmp_path / "cache" / FOLDER).glob("*/[0-9]*.bin"):
        shard.unlink()
    with opened(config, tmp_path / "cache") as corpus:
        assert torch.equal(read_units(corpus, range(40, 50)), whole[40 * 8 : 50 * 8])
    made_again = {path.name for path in (tmp_path / "cache" / FOLDER).glob("*/[0-9]*.bin")}
    assert (
        made_again <= {"00010.bin", "00011.bin", "00012.bin", "00013.bin"}
        and "00012.bin" in made_again
    )


def test_the_cache_stays_within_its_limit_and_the_sequences_are_the_same(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    with opened(config, tmp_path / "all") as corpus:
        whole = read_units(corpus, UNITS)
    limit = 5 * SHARD_BYTES
    published(config, str(tmp_path / "store"))
    for name, each in (("own", config), ("fetched", store_config(str(tmp_path / "store")))):
        with opened(each, tmp_path / name, cache_bytes=limit) as corpus:
            batches, found = batches_of(corpus), []
            for unit in UNITS:
                found += batches.micro_batches(unit, 0, 1, 8)
                assert shard_bytes(tmp_path / name) <= limit
        assert torch.equal(torch.cat(found), whole)


def test_only_the_shards_that_are_read_or_expected_are_fetched_from_a_store(tmp_path: Path) -> None:
    published(rows_config(write_rows(tmp_path / "text")), str(tmp_path / "store"))
    with opened(store_config(str(tmp_path / "store")), tmp_path / "cache") as corpus:
        batches = batches_of(corpus)
        batches.expect([range(36, 44)])
        batches.micro_batches(36, 0, 1, 8)
        batches.micro_batches(40, 0, 1, 8)
    names = sorted(path.name for path in (tmp_path / "cache" / FOLDER).glob("*/[0-9]*.bin"))
    assert (
        set(names) <= {"00000.bin", "00001.bin", "00009.bin", "00010.bin"} and "00010.bin" in names
    )


def test_whole_texts_in_a_store_are_shuffled_as_a_whole_if_asked(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"), order="global")
    published(config, str(tmp_path / "store"))
    with opened(
        store_config(str(tmp_path / "store"), order="global"), tmp_path / "cache"
    ) as corpus:
        found = read_units(corpus, range(50))
    assert torch.equal(found, read_units(prepare_corpus(config, tmp_path / "cache"), range(50))), (
        READING_ORDER
    )


def test_a_limit_that_cannot_hold_what_is_read_at_once_is_refused(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    with (
        pytest.raises(InputError, match=r"island.shards.cache_gb: got .* needs .*; raise it"),
        opened(config, tmp_path / "c", cache_bytes=2 * SHARD_BYTES),
    ):
        pass


def test_shards_that_others_read_are_not_deleted_to_make_room(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3 * 100)
    for number in range(3):
        with cache.place(tmp_path / "text" / f"{number:05}.bin", 100) as place:
            place.keep()
    held = [(tmp_path / "text" / f"{number:05}.bin").open("rb") for number in range(3)]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_SH)
    with (
        pytest.raises(InputError, match="processes are reading 3e-07 GB of them now"),
        cache.place(tmp_path / "text" / "00003.bin", 100),
    ):
        pass
    held[1].close()
    with cache.place(tmp_path / "text" / "00003.bin", 100) as place:
        place.keep()
    assert sorted(p.name for p in (tmp_path / "text").iterdir()) == [
        "00000.bin",
        "00002.bin",
        "00003.bin",
    ]


class SlowToReturn(PosixPath):
    """A path of which `open` makes the file, and returns when another thread has had its turn."""

    def open(self, *args: Any, **kwargs: Any) -> IO[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        file = super().open(*args, **kwargs)

        folder = Path(str(self.parent))

        def place_another() -> None:
            with ShardCache(folder.parent, None).place(folder / "00001.bin", 100) as place:
                place.keep()

        other = threading.Thread(target=place_another, daemon=True)
        other.start()
        other.join(0.3)  # it has to wait for this one
        return file


def test_a_shard_that_is_begun_is_not_taken_for_that_of_a_process_that_died(tmp_path: Path) -> None:
    with ShardCache(tmp_path, None).place(
        SlowToReturn(tmp_path, "text", "00000.bin"), 100
    ) as place:
        assert place.path.exists()


def test_a_shard_that_the_disk_has_damaged_is_made_again(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    with opened(config, tmp_path / "cache") as corpus:
        whole = read_units(corpus, range(20))
    (shard,) = (tmp_path / "cache" / FOLDER).glob("*/00001.bin")
    shard.write_bytes(bytes(shard.stat().st_size))
    with opened(config, tmp_path / "cache") as corpus:
        assert torch.equal(read_units(corpus, range(20)), whole)


def test_text_that_changes_in_the_run_is_noticed(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "text")
    config, file = rows_config(folder), folder / "a.jsonl"
    with opened(config, tmp_path / "cache", ahead=1) as corpus:
        read_units(corpus, range(60))
        for shard in (tmp_path / "cache" / FOLDER).glob("*/0000[0-9].bin"):
            shard.unlink()
        stat = file.stat()
        file.write_bytes(file.read_bytes().replace(b"number", b"member"))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(
            InputError, match="differs from the shard that was made first: the text or"
        ):
            read_units(corpus, range(20, 30))


def test_broken_text_is_named_by_its_line(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "text")
    with (folder / "a.jsonl").open("a") as file:
        file.write("{broken\n")
    with (
        opened(rows_config(folder), tmp_path / "cache") as corpus,
        pytest.raises(InputError, match="line 61: not JSON"),
    ):
        read_units(corpus, range(60))


def test_a_damaged_index_in_the_cache_is_named(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    with opened(config, tmp_path / "cache"):
        pass
    (index,) = (tmp_path / "cache" / FOLDER).glob(f"*/{INDEX}")
    index.write_text("{}")
    with (
        pytest.raises(InputError, match="is not the index of a prepared text"),
        opened(config, tmp_path / "cache"),
    ):
        pass
