"""Shards: the same text whoever makes them, from the beginning or alone."""

import gzip
import json
import tarfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
import zstandard

from inner.config import DataConfig
from inner.data.corpus import prepare_corpus
from inner.data.sources.build import build_source
from inner.data.sources.documents import read_from
from inner.data.streaming.index import ShardIndex
from inner.data.streaming.make import MadeShard, make_shards, new_index
from inner.data.tokenizer import BytesTokenizer
from inner.errors import InputError
from tests.inner.data.streaming.texts import SHARD_TOKENS, rows_config, write_rows

IDENTITY = "0" * 16


def made(config: DataConfig, processes: int = 1) -> list[MadeShard]:
    return list(make_shards(config, new_index(config, IDENTITY), 0, processes, lambda share: None))


def index_of(config: DataConfig, shards: list[MadeShard]) -> ShardIndex:
    records, last = tuple(shard.made.record for shard in shards), shards[-1]
    change = {
        "shards": records,
        "following": last.made.following,
        "heldout": last.made.heldout,
        "is_complete": True,
    }
    return new_index(config, IDENTITY).model_copy(update=change)


def joined(shards: list[MadeShard]) -> np.ndarray:
    """The text of which the shards are made: each but the last has the first id of the next at its
    end.
    """
    return np.concatenate([*(shard.ids[:-1] for shard in shards[:-1]), shards[-1].ids])


def test_shards_are_the_prepared_text_cut_at_fixed_places(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    shards = made(config)
    (text,) = prepare_corpus(config, tmp_path / "cache").texts
    assert np.array_equal(joined(shards), text.train[:])
    assert [len(shard.ids) for shard in shards[:-1]] == [SHARD_TOKENS + 1] * (len(shards) - 1)
    assert all(first.ids[-1] == second.ids[0] for first, second in pairwise(shards))


def test_the_held_out_text_is_of_the_documents_before_the_end_of_the_first_shard(
    tmp_path: Path,
) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    first, *others = made(config)
    (text,) = prepare_corpus(config, tmp_path / "cache").texts
    assert first.heldout_ids is not None and all(shard.heldout_ids is None for shard in others)
    heldout = text.heldout[: len(first.heldout_ids)]
    assert np.array_equal(first.heldout_ids, heldout) and 16 < len(heldout) < len(text.heldout)
    assert first.made.heldout.text_bytes == len(BytesTokenizer().decode(heldout).encode())


def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"))
    assert [shard.made.record for shard in made(config)] == [
        shard.made.record for shard in made(config, processes=2)
    ]


def as_gzip(folder: Path) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))


def as_zstd(folder: Path) -> None:
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress((folder / "a.jsonl").read_bytes()))


def as_parquet(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "a.parquet", row_group_size=7
    )


def as_tar(folder: Path) -> None:
    as_files(folder)
    with tarfile.open(folder / "a.tar", "w") as archive:
        for path in sorted(folder.glob("*.txt")):
            archive.add(path, path.name)
            path.unlink()


def as_files(folder: Path) -> None:
    for number, line in enumerate((folder / "a.jsonl").read_text().splitlines()):
        (folder / f"{number:03}.txt").write_text(json.loads(line)["text"])


def as_jsonl(folder: Path) -> None:
    (folder / "b.jsonl").write_text("\n" + (folder / "a.jsonl").read_text())


@pytest.mark.parametrize("change", [as_jsonl, as_gzip, as_zstd, as_parquet, as_tar, as_files])
def test_any_shard_made_alone_is_the_same(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = write_rows(tmp_path / "text")
    change(folder)
    (folder / "a.jsonl").unlink()
    write_rows(folder, name="z.jsonl")
    config = rows_config(folder)
    shards = made(config)
    index = index_of(config, shards)
    assert len(shards) > 12
    for number in (1, 5, len(shards) - 1):
        alone = next(make_shards(config, index, number, 1, lambda share: None))
        assert (alone.made.record, alone.made.following) == (
            shards[number].made.record,
            shards[number].made.following,
        )
        assert np.array_equal(alone.ids, shards[number].ids)


@pytest.mark.parametrize("change", [as_jsonl, as_gzip, as_parquet, as_tar, as_files])
def test_files_are_read_on_from_any_document(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = write_rows(tmp_path / "text")
    change(folder)
    source = build_source(rows_config(folder))
    documents = list(source.documents())
    for number in (0, 1, 30, 75, len(documents) - 1):
        found = list(read_from(source, number, documents[number].place))
        assert found == documents[number:]


def write_dataset(folder: Path) -> DataConfig:
    """A dataset of three files, read in row groups that are smaller than a file; some rows are
    empty.
    """
    texts = [f"number {i}\n" * (i * 7 % 20) for i in range(90)]
    folder.mkdir()
    for number in range(3):
        rows = [{"text": text} for text in texts[30 * number : 30 * number + 30]]
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, folder / f"train-{number}.parquet", row_group_size=7)
    return rows_config(
        folder, source="huggingface", dataset=str(folder), paths=[], max_tokens=100_000
    )


@pytest.mark.parametrize("break_files", [False, True])
def test_a_dataset_is_read_on_from_any_row_without_the_files_before(
    tmp_path: Path, break_files: bool
) -> None:
    config = write_dataset(tmp_path / "mine")
    source = build_source(config)
    documents = list(source.documents())
    if break_files:
        # Its schema, at the end, is read when the dataset is opened.
        with (tmp_path / "mine" / "train-0.parquet").open("r+b") as file:
            file.write(b"x" * 200)
    for number in (40, 60, len(documents) - 1) if break_files else (0, 1, 30, 40, 60):
        assert list(read_from(source, number, documents[number].place)) == documents[number:]


def test_a_dataset_whose_rows_moved_is_read_from_its_beginning(tmp_path: Path) -> None:
    source = build_source(write_dataset(tmp_path / "mine"))
    documents = list(source.documents())
    place = documents[40].place
    assert place is not None
    elsewhere = [place[0], place[1] - 1, *place[2:]]
    assert list(read_from(source, 40, elsewhere)) == documents[40:]


def test_a_shard_of_a_dataset_can_be_made_alone(tmp_path: Path) -> None:
    config = write_dataset(tmp_path / "mine")
    shards = made(config)
    index = index_of(config, shards)
    alone = next(make_shards(config, index, len(shards) - 2, 1, lambda share: None))
    assert alone.made == shards[-2].made and np.array_equal(alone.ids, shards[-2].ids)


def test_a_shard_is_made_without_reading_the_rows_before_it(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "text")
    config = rows_config(folder)
    index, whole = index_of(config, made(config)), (folder / "a.jsonl").read_bytes()
    begin = index.shards[5].begin.place
    assert begin is not None and begin[2] > 100
    (folder / "a.jsonl").write_bytes(b"x" * begin[2] + whole[begin[2] :])
    assert next(make_shards(config, index, 5, 1, lambda share: None)).made.record == index.shards[5]


def test_the_end_of_one_long_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(2000)))
    config = rows_config(tmp_path / "a.txt", heldout_fraction=0.02)
    shards = made(config)
    index = index_of(config, shards)
    assert shards[0].made.heldout.is_end and shards[0].heldout_ids is not None
    assert BytesTokenizer().decode(shards[0].heldout_ids).endswith("line 1999\n")
    assert (
        next(make_shards(config, index, len(shards) - 1, 1, lambda share: None)).made.record
        == shards[-1].made.record
    )


def test_max_tokens_ends_the_text(tmp_path: Path) -> None:
    config = rows_config(write_rows(tmp_path / "text"), max_tokens=SHARD_TOKENS + 100)
    assert [len(shard.ids) for shard in made(config)] == [SHARD_TOKENS + 1, 100]


def test_conversations_do_not_cross_sequences_and_their_shards_can_be_made_alone(
    tmp_path: Path,
) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "hello" * (i % 3)},
                {"role": "assistant", "content": f"answer {i}"},
            ]
        }
        for i in range(200)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = rows_config(tmp_path / "a.jsonl", format="chat", seq_len=128)
    shards = made(config)
    (text,) = prepare_corpus(config, tmp_path / "cache").texts
    assert len(shards) > 5 and np.array_equal(joined(shards), text.train[:])
    alone = next(make_shards(config, index_of(config, shards), 3, 1, lambda share: None))
    assert np.array_equal(alone.ids, shards[3].ids)


def test_a_text_of_which_nothing_is_held_out_is_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(
        InputError, match=r"6 tokens to train on and 0 held out .*raise data\.heldout_fraction"
    ):
        made(rows_config(tmp_path / "a.txt", heldout_fraction=0.001))
