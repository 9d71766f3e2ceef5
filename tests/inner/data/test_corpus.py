"""Corpora: held-out documents, caching, max_tokens, and several processes that prepare at once."""

import json
import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

from inner.config import DataConfig
from inner.data.corpus import Corpus, check_source, prepare_corpus
from inner.data.shards import Tokens
from inner.data.sources.documents import is_heldout
from inner.data.tokenizer import BytesTokenizer
from inner.errors import InputError

EOS = BytesTokenizer.eos_id


def write_texts(folder: Path, count: int = 40) -> dict[str, str]:
    """Write files a00.txt ...; returns texts by key."""
    folder.mkdir(exist_ok=True)
    texts = {f"a{i:02}.txt": f"text number {i} \u00e9\n" * 20 for i in range(count)}
    for key, text in texts.items():
        (folder / key).write_text(text, encoding="utf-8")
    return texts


def files_config(folder: Path, **changes: object) -> DataConfig:
    return DataConfig.model_validate(
        {"source": "files", "paths": [str(folder)], "heldout_fraction": 0.2, **changes}
    )


def documents_of(row: Tokens) -> list[str]:
    tokens = row[:]
    ends = np.flatnonzero(tokens == EOS)
    assert ends[-1] == len(tokens) - 1
    return [BytesTokenizer().decode(part) for part in np.split(tokens, ends + 1)[:-1]]


def corpora_in(cache: Path) -> list[str]:
    """Names of the finished and unfinished folders, without the lock files beside them."""
    return [path.name for path in cache.iterdir() if path.is_dir()]


def test_every_document_is_in_exactly_one_split_by_its_key(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "data")
    corpus = prepare_corpus(files_config(tmp_path / "data"), tmp_path / "cache")
    assert documents_of(corpus.texts[0].train) == [
        t for k, t in texts.items() if not is_heldout(k, 0.2)
    ]
    assert documents_of(corpus.texts[0].heldout) == [
        t for k, t in texts.items() if is_heldout(k, 0.2)
    ]


def test_heldout_bytes_are_the_utf8_bytes_of_the_heldout_text(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "data")
    corpus = prepare_corpus(files_config(tmp_path / "data"), tmp_path / "cache")
    assert corpus.texts[0].heldout_bytes == sum(
        len(t.encode()) for k, t in texts.items() if is_heldout(k, 0.2)
    )


def test_the_held_out_share_is_near_the_fraction() -> None:
    held = sum(is_heldout(f"file {i}", 0.1) for i in range(10000))
    assert 900 < held < 1100


def test_a_key_is_held_out_on_every_machine_or_on_none() -> None:
    assert [is_heldout(f"a{i}.py", 0.5) for i in range(8)] == [
        True,
        True,
        False,
        True,
        True,
        True,
        True,
        True,
    ]


def test_the_second_call_reads_the_cache_and_not_the_source(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    config = files_config(tmp_path / "data")
    first = prepare_corpus(config, tmp_path / "cache")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    second = prepare_corpus(config, tmp_path / "cache")
    assert np.array_equal(first.texts[0].train[:], second.texts[0].train[:])
    assert np.array_equal(first.texts[0].heldout[:], second.texts[0].heldout[:])
    assert (
        isinstance(second.texts[0].train[:], np.memmap)
        and second.texts[0].train[:].dtype == np.uint16
    )
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    config = files_config(tmp_path / "data")
    before = prepare_corpus(config, tmp_path / "cache")
    for path in (tmp_path / "data").iterdir():
        path.write_text("other text")
    assert len(prepare_corpus(config, tmp_path / "cache").texts[0].train) != len(
        before.texts[0].train
    )


def test_another_sequence_length_shares_the_token_files(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    for seq_len in (8, 16):
        prepare_corpus(files_config(tmp_path / "data", seq_len=seq_len), tmp_path / "cache")
    assert len(corpora_in(tmp_path / "cache")) == 1


def test_max_tokens_cuts_training_and_keeps_some_heldout(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "data")
    whole = prepare_corpus(files_config(tmp_path / "data"), tmp_path / "cache")
    corpus = prepare_corpus(files_config(tmp_path / "data", max_tokens=1000), tmp_path / "cache")
    assert np.array_equal(corpus.texts[0].train[:], whole.texts[0].train[:1000])
    assert documents_of(corpus.texts[0].heldout) == [
        next(t for k, t in texts.items() if is_heldout(k, 0.2))
    ]


def test_max_tokens_reads_on_until_something_is_held_out(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "data")
    first = next(index for index, key in enumerate(texts) if is_heldout(key, 0.2))
    assert first > 0, "the first file must be one to train on, or this test shows nothing"
    corpus = prepare_corpus(files_config(tmp_path / "data", max_tokens=5), tmp_path / "cache")
    assert len(corpus.texts[0].train) == 5 and len(corpus.texts[0].heldout) > 5


def prepare_and_check(folder: Path, cache: Path, barrier: Barrier) -> None:
    barrier.wait(timeout=30)
    corpus = prepare_corpus(files_config(folder), cache)
    assert corpus.texts[0].train[-1:] == corpus.texts[0].heldout[-1:] == EOS


def test_processes_that_prepare_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    write_texts(tmp_path / "data", 300)
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(4)
    args = (tmp_path / "data", tmp_path / "cache", barrier)
    processes = [fork.Process(target=prepare_and_check, args=args) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(corpora_in(tmp_path / "cache")) == 1


def test_a_source_that_breaks_leaves_nothing_behind(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {i}"}) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{broken"]))
    with pytest.raises(InputError, match=r"a.jsonl, line 51: not JSON"):
        prepare_corpus(files_config(tmp_path / "a.jsonl"), tmp_path / "cache")
    assert corpora_in(tmp_path / "cache") == []


def test_a_damaged_token_file_is_named(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    config = files_config(tmp_path / "data")
    prepare_corpus(config, tmp_path / "cache")
    (file,) = (tmp_path / "cache").rglob("train.bin")
    os.truncate(file, 10)
    with pytest.raises(
        InputError,
        match=r"train.bin: 10 bytes, need \d+: the file is damaged; delete .*cache/files-\w+$",
    ):
        prepare_corpus(config, tmp_path / "cache")


def test_a_few_words_cannot_be_trained_on_and_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alone")
    with pytest.raises(
        InputError, match=r"1 documents to train on and 0 held out .* raise data.heldout_fraction"
    ):
        prepare_corpus(files_config(tmp_path / "a.txt", heldout_fraction=0.02), tmp_path / "cache")


def test_one_long_text_is_trained_on_but_for_its_last_lines(tmp_path: Path) -> None:
    lines = [f"line {number} of a play\n" for number in range(2000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    (text,) = prepare_corpus(
        files_config(tmp_path / "a.txt", heldout_fraction=0.02), tmp_path / "cache"
    ).texts
    (train,), (heldout,) = documents_of(text.train), documents_of(text.heldout)
    assert train + heldout == "".join(lines) and heldout.startswith("line ")
    assert text.heldout_bytes == len(heldout) == pytest.approx(0.02 * len("".join(lines)), rel=0.05)


def test_the_end_of_the_last_of_a_few_texts_is_held_out_if_no_other_is(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 1000)
    config = files_config(tmp_path / "*.txt", heldout_fraction=1e-3)
    (text,) = prepare_corpus(config, tmp_path / "cache").texts
    assert documents_of(text.train) == ["a.txt" * 1000, ("b.txt" * 1000)[:4995]]
    assert documents_of(text.heldout) == ["b.txt"]


def stdlib_corpus(cache: Path) -> Corpus:
    config = DataConfig(max_tokens=200_000)
    check_source(config)
    return prepare_corpus(config, cache)


def test_the_standard_library_gives_python_to_train_on(tmp_path: Path) -> None:
    corpus = stdlib_corpus(tmp_path)
    assert len(corpus.texts[0].train) == 200_000
    assert corpus.vocab_size == 260
    assert "\ndef " in documents_of(corpus.texts[0].heldout)[0] + BytesTokenizer().decode(
        corpus.texts[0].train[:]
    )
