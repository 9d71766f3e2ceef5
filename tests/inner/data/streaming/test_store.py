"""A store that is damaged, lies, is away for a while, or grows while it is read."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from inner.data.streaming.index import INDEX, parse_index, sha256_of, shard_name
from inner.data.streaming.open import shards_identity
from inner.data.streaming.publish import publish, repair
from inner.data.streaming.store import Store, call_in_time
from inner.errors import InputError
from tests.inner.data.streaming.texts import (
    opened,
    published,
    read_units,
    rows_config,
    store_config,
    write_rows,
)

UNITS = range(60)


class FaultyFiles(LocalFileSystem):
    """Files at faulty://, which raises what `faults` holds instead of reading."""

    protocol = "faulty"
    cachable = False
    faults: list[Exception] = []  # noqa: RUF012 - one for all instances, because fsspec makes them

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        if self.faults:
            raise self.faults.pop()
        return super().cat_file(path, start, end, **kwargs)


fsspec.register_implementation("faulty", FaultyFiles, clobber=True)


@contextmanager
def faults(*errors: Exception) -> Iterator[None]:
    FaultyFiles.faults[:] = errors
    try:
        yield
    finally:
        FaultyFiles.faults.clear()


@pytest.fixture
def url(tmp_path: Path) -> str:
    published(rows_config(write_rows(tmp_path / "text")), str(tmp_path / "store"))
    return str(tmp_path / "store")


def test_a_damaged_shard_ends_the_run_with_its_name_and_the_cure(tmp_path: Path, url: str) -> None:
    path = Path(url) / shard_name(3)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with opened(store_config(url), tmp_path / "cache") as corpus:
        read_units(corpus, range(8))
        with pytest.raises(
            InputError, match=r"store/00003.bin: it is missing or damaged: .* --repair"
        ):
            read_units(corpus, UNITS)


@pytest.mark.parametrize("length", [0, 100, 1027])
def test_a_shard_of_another_length_is_damaged(tmp_path: Path, url: str, length: int) -> None:
    (Path(url) / shard_name(0)).write_bytes(bytes(length))
    with (
        opened(store_config(url), tmp_path / "cache") as corpus,
        pytest.raises(InputError, match="missing or damaged"),
    ):
        read_units(corpus, UNITS)


def test_repair_makes_what_is_damaged_again(tmp_path: Path, url: str) -> None:
    config, store = rows_config(tmp_path / "text"), Store(url, 5)
    whole = {path.name: path.read_bytes() for path in Path(url).iterdir()}
    (Path(url) / shard_name(0)).write_bytes(b"damaged")
    (Path(url) / shard_name(7)).unlink()
    (Path(url) / "heldout.bin").unlink()
    index = publish(config, shards_identity(config), store, 1, lambda index, share: None)
    assert repair(config, index, store, 1, lambda index, share: None) == [
        "heldout.bin",
        "00000.bin",
        "00007.bin",
    ]
    assert {path.name: path.read_bytes() for path in Path(url).iterdir()} == whole


def test_a_store_that_is_away_for_a_while_is_waited_for(tmp_path: Path, url: str) -> None:
    with opened(store_config(url), tmp_path / "one") as corpus:
        whole = read_units(corpus, UNITS)
    with (
        opened(store_config(f"faulty://{url}"), tmp_path / "two") as corpus,
        faults(*[OSError("away")] * 4),
    ):
        assert torch.equal(read_units(corpus, UNITS), whole) and not FaultyFiles.faults


def test_a_store_that_stays_away_ends_the_island_with_a_clear_word(
    tmp_path: Path, url: str
) -> None:
    config = store_config(f"faulty://{url}")
    with (
        opened(config, tmp_path / "two", patience=1.0) as corpus,
        faults(*[OSError("away")] * 1000),
    ):
        with pytest.raises(
            InputError,
            match=r"has not answered for \d s \(island.shards.store_seconds: 1\): OSError: away",
        ):
            read_units(corpus, UNITS)
        FaultyFiles.faults.clear()
        assert len(read_units(corpus, range(10))) == 80  # it can be tried again


def test_a_store_that_refuses_is_not_asked_again(tmp_path: Path, url: str) -> None:
    config = store_config(f"faulty://{url}")
    with (
        faults(*[PermissionError("403")] * 2),
        pytest.raises(InputError, match=r"may not use it .*; give it the store's keys"),
        opened(config, tmp_path / "two"),
    ):
        pass
    assert len(FaultyFiles.faults) == 0


def test_a_request_that_takes_too_long_has_failed() -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        call_in_time(ended.wait, 0.05)
    ended.set()


def test_a_text_is_read_while_it_is_written(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store_config(url), tmp_path / "one") as corpus:
        whole = read_units(corpus, UNITS)
    config, growing = rows_config(tmp_path / "text"), Store(str(tmp_path / "growing"), 5)
    identity = shards_identity(config)
    asked = threading.Semaphore(1)
    write = Store.write

    def write_when_read(store: Store, name: str, data: bytes) -> None:
        # Each shard is written only after the reader has waited for it.
        if name != INDEX and name != "heldout.bin":
            assert asked.acquire(timeout=60)
        write(store, name, data)

    monkeypatch.setattr(Store, "write", write_when_read)
    writer = threading.Thread(
        target=publish, args=(config, identity, growing, 1, lambda index, share: None)
    )
    writer.start()
    try:
        with opened(store_config(growing.url), tmp_path / "two") as corpus:
            assert not parse_index((tmp_path / "growing" / INDEX).read_bytes(), "").is_complete
            releaser = threading.Timer(0.1, lambda: asked.release(1000))
            releaser.start()
            assert torch.equal(read_units(corpus, UNITS), whole)
    finally:
        asked.release(1000)
        writer.join(60)


def test_a_writer_that_has_stopped_is_waited_for_as_long_as_is_said(tmp_path: Path) -> None:
    config, store = rows_config(write_rows(tmp_path / "text")), Store(str(tmp_path / "store"), 5)

    def stop_after_three(index: object, share: float | None) -> None:
        if len(index.shards) == 3:  # pyright: ignore
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(config, shards_identity(config), store, 1, stop_after_three)
    with opened(store_config(store.url), tmp_path / "cache", patience=1.0) as corpus:
        read_units(corpus, range(8))
        with pytest.raises(
            InputError, match=r"only 3 shards, unfinished, .* shard 3 is needed; make sure that"
        ):
            read_units(corpus, UNITS)


def test_an_interrupted_writer_goes_on_with_the_same_result(tmp_path: Path, url: str) -> None:
    config, again = rows_config(tmp_path / "text"), Store(str(tmp_path / "again"), 5)
    identity, seen = shards_identity(config), []

    def stop_once(index: object, share: float | None) -> None:
        seen.append(len(index.shards))  # pyright: ignore
        if seen[-1] == 5 and seen.count(5) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(config, identity, again, 1, stop_once)
    publish(config, identity, again, 1, stop_once)
    first, second = (
        sorted((p.name, p.read_bytes()) for p in Path(u).iterdir()) for u in (url, again.url)
    )
    assert first == second


def test_another_text_at_the_same_place_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InputError, match="has the shards of another text"):
        published(rows_config(write_rows(tmp_path / "other", 70)), url)


def test_a_store_whose_text_changes_in_the_run_is_noticed(tmp_path: Path, url: str) -> None:
    growing = tmp_path / "growing"
    growing.mkdir()
    index = parse_index((Path(url) / INDEX).read_bytes(), "")
    part = index.model_copy(update={"shards": index.shards[:4], "is_complete": False})
    for name in ("heldout.bin", *map(shard_name, range(4))):
        (growing / name).write_bytes((Path(url) / name).read_bytes())
    (growing / INDEX).write_text(part.model_dump_json())
    with opened(store_config(str(growing)), tmp_path / "cache") as corpus:
        read_units(corpus, range(8))
        other = part.shards[0].model_copy(update={"sha256": "0" * 64})
        (growing / INDEX).write_text(
            index.model_copy(update={"shards": (other, *index.shards[1:])}).model_dump_json()
        )
        with pytest.raises(
            InputError, match="its index does not continue the index that it had before"
        ):
            read_units(corpus, UNITS)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"format": 2}',
        b'{"identity": "../../../etc/passwd"}',
        b"null",
        b"\xff",
    ],
)
def test_an_index_that_lies_is_refused(text: bytes) -> None:
    with pytest.raises(
        InputError, match=r"s3://b/index\.json: is not the index of a prepared text"
    ):
        parse_index(text, "s3://b/index.json")


def test_an_index_whose_shards_cannot_be_is_refused(url: str) -> None:
    index = parse_index((Path(url) / INDEX).read_bytes(), "")
    short = index.shards[0].model_copy(update={"tokens": 5})
    for change in (
        {"shards": (short, *index.shards[1:])},
        {"heldout": None},
        {"is_complete": False},
    ):
        with pytest.raises(InputError, match="is not the index"):
            parse_index(index.model_copy(update=change).model_dump_json().encode(), "x")


def test_another_tokenizer_or_length_of_shards_is_named(tmp_path: Path, url: str) -> None:
    with (
        pytest.raises(InputError, match=r"set data\.shard_tokens=512"),
        opened(store_config(url, shard_tokens=1024), tmp_path / "cache"),
    ):
        pass


def test_a_text_that_is_still_written_cannot_be_shuffled_as_a_whole(
    tmp_path: Path, url: str
) -> None:
    path = Path(url) / INDEX
    index = parse_index(path.read_bytes(), "")
    path.write_text(
        index.model_copy(
            update={"shards": index.shards[:2], "is_complete": False}
        ).model_dump_json()
    )
    with (
        pytest.raises(InputError, match=r"set data\.order=shards"),
        opened(store_config(url, order="global"), tmp_path),
    ):
        pass


def test_ids_that_the_tokenizer_does_not_have_are_refused(tmp_path: Path, url: str) -> None:
    path = Path(url) / INDEX
    index, ids = parse_index(path.read_bytes(), ""), np.full(513, 300, np.uint16)
    (Path(url) / shard_name(0)).write_bytes(ids.tobytes())
    other = index.shards[0].model_copy(update={"sha256": sha256_of(ids.data)})
    path.write_text(
        index.model_copy(update={"shards": (other, *index.shards[1:])}).model_dump_json()
    )
    with (
        opened(store_config(url), tmp_path / "cache") as corpus,
        pytest.raises(InputError, match="holds the ids 300"),
    ):
        read_units(corpus, range(4))


def test_a_disk_that_is_full_is_said(tmp_path: Path, url: str) -> None:
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        code = 1
        try:
            with opened(store_config(url), tmp_path / "cache") as corpus:
                read_units(corpus, UNITS)
        except InputError as error:
            code = (
                0
                if "cannot write (File too large)" in str(error)
                and "island.cache_dir" in str(error)
                else 2
            )
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
