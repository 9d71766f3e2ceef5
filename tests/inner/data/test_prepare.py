"""Preparation: round trips through shards, resuming after kills, several processes, a full disk."""

import json
import multiprocessing
import os
import resource
import select
import signal
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from inner.config import DataConfig
from inner.data import lock, tokenise
from inner.data.batches import IslandBatches
from inner.data.corpus import prepare_corpus
from inner.data.lock import hold_lock
from inner.data.micro_batch import Cutter
from inner.data.prepare import PrepareOptions, PrepareProgress
from inner.data.shards import ShardedTokens, Tokens
from inner.data.sources.documents import is_heldout
from inner.data.tokenizer import BytesTokenizer, build_tokenizer
from inner.errors import InputError

GUARD_SECONDS = 60
SHARD_TOKENS = 1500
FORK = multiprocessing.get_context("fork")


def write_texts(folder: Path, count: int = 60) -> dict[str, str]:
    """Write rows of unequal length to a .jsonl file; returns texts by key."""
    folder.mkdir()
    texts = {f"a.jsonl#{i}": f"number {i} \u00e9\n" * (1 + i * 7 % 40) for i in range(count)}
    lines = [json.dumps({"text": text}) + "\n" for text in texts.values()]
    (folder / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    return texts


def config_of(folder: Path, **changes: object) -> DataConfig:
    values = {"source": "files", "paths": [str(folder)], "heldout_fraction": 0.2}
    return DataConfig.model_validate(values | changes)


def files_of(cache: Path) -> dict[str, bytes]:
    """Contents of all files of a cache except locks."""
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {path.relative_to(cache).as_posix(): path.read_bytes() for path in files}


def documents_in(tokens: Tokens) -> list[np.ndarray]:
    """Documents of a split, cut by the index without looking for eos."""
    assert isinstance(tokens, ShardedTokens)
    return np.split(tokens[:], tokens.document_ends())[:-1]


def options(**changes: object) -> PrepareOptions:
    return PrepareOptions(
        **{"shard_tokens": SHARD_TOKENS, "report": lambda progress: None} | changes
    )  # pyright: ignore


def killed(config: DataConfig, cache: Path, after: int) -> None:
    """Prepare in a process that is killed after this number of documents."""

    def report(progress: PrepareProgress) -> None:
        if progress.published.num_read + progress.shard.counts.num_read == after:
            os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=prepare_corpus, args=(config, cache, options(report=report)))
    process.start()
    process.join(GUARD_SECONDS)
    assert process.exitcode == -signal.SIGKILL


def bpe_file(path: Path, texts: list[str]) -> str:
    """A small real tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return str(path)


def test_text_comes_back_from_the_shards_document_by_document(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "data")
    corpus = prepare_corpus(config_of(tmp_path / "data"), tmp_path / "cache", options())
    assert len(list((tmp_path / "cache").glob("*/0*"))) > 5
    (text,) = corpus.texts
    for tokens, is_held in ((text.train, False), (text.heldout, True)):
        documents = documents_in(tokens)
        assert all(ids[-1] == BytesTokenizer.eos_id for ids in documents)
        wanted = [text for key, text in texts.items() if is_heldout(key, 0.2) == is_held]
        assert [BytesTokenizer().decode(ids) for ids in documents] == wanted


def test_text_comes_back_through_a_real_tokenizer(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "data", 20)
    name = bpe_file(tmp_path / "t.json", list(texts.values()))
    corpus = prepare_corpus(
        config_of(tmp_path / "data", tokenizer=name), tmp_path / "cache", options()
    )
    tokenizer = build_tokenizer(name)
    documents = [tokenizer.decode(ids) for ids in documents_in(corpus.texts[0].train)]
    assert documents == [text for key, text in texts.items() if not is_heldout(key, 0.2)]
    assert len(corpus.texts[0].train) < sum(map(len, documents))


def test_shards_are_bounded_and_any_range_is_read_over_their_borders(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    cut = prepare_corpus(config_of(tmp_path / "data"), tmp_path / "cut", options()).texts[0].train
    whole = prepare_corpus(config_of(tmp_path / "data"), tmp_path / "whole").texts[0].train[:]
    for file in (tmp_path / "cut").glob("*/0*/train.bin"):
        assert file.stat().st_size <= 2 * (SHARD_TOKENS + 600)
    for start in range(0, len(whole), 91):
        for length in (0, 1, 200, 4000):
            assert np.array_equal(cut[start : start + length], whole[start : start + length])


@pytest.mark.parametrize("after", [1, 40])
def test_a_killed_preparation_resumes_with_the_same_result(tmp_path: Path, after: int) -> None:
    write_texts(tmp_path / "data")
    config = config_of(tmp_path / "data", max_tokens=14000)
    prepare_corpus(config, tmp_path / "whole", options())
    killed(config, tmp_path / "cache", after)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*/0*/*")}
    assert bool(kept) == (after > 1)
    killed(config, tmp_path / "cache", 60)
    prepare_corpus(config, tmp_path / "cache", options())
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")
    moved = {
        path.parents[1].with_suffix("") / path.parent.name / path.name: time
        for path, time in kept.items()
    }
    assert all(path.stat().st_mtime_ns == time for path, time in moved.items())


def test_two_processes_write_what_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_texts(tmp_path / "data", 40)
    # Each chunk has some of the documents, not all.
    monkeypatch.setattr(tokenise, "CHUNK_CHARACTERS", 500)
    name = bpe_file(tmp_path / "t.json", list(texts.values()))
    # Few enough tokens that some documents are encoded after their split is full.
    config = config_of(tmp_path / "data", tokenizer=name, max_tokens=1000)
    for processes in (1, 2):
        prepare_corpus(config, tmp_path / str(processes), options(processes=processes))
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def prepare_and_be_killed(config: DataConfig, cache: Path, pids: Connection) -> None:
    def report(progress: PrepareProgress) -> None:
        pids.send([child.pid for child in multiprocessing.active_children()])
        os.kill(os.getpid(), signal.SIGKILL)

    prepare_corpus(config, cache, options(processes=2, report=report))


def test_worker_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    write_texts(tmp_path / "data", 5)
    ours, theirs = FORK.Pipe()
    args = (config_of(tmp_path / "data"), tmp_path / "cache", theirs)
    process = FORK.Process(target=prepare_and_be_killed, args=args)
    process.start()
    assert ours.poll(GUARD_SECONDS)
    ended = [has_ended(pid) for pid in ours.recv()]
    process.join(GUARD_SECONDS)
    assert ended and all(wait() for wait in ended)


def has_ended(pid: int) -> Callable[[], bool]:
    """A function that waits for the process to end and says whether it did within the guard."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda: True
    return lambda: bool(select.select([descriptor], [], [], GUARD_SECONDS)[0])


def prepare_without_room(config: DataConfig, cache: Path, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        prepare_corpus(config, cache, options())
    except InputError as error:
        answer.send(str(error))


def test_a_full_disk_is_one_error_and_finished_shards_stay(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    with (tmp_path / "data" / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "x" * 30_000}) + "\n")
    config = config_of(tmp_path / "data")
    prepare_corpus(config, tmp_path / "whole", options())
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=prepare_without_room, args=(config, tmp_path / "cache", theirs))
    process.start()
    assert ours.poll(GUARD_SECONDS)
    message = ours.recv()
    process.join(GUARD_SECONDS)
    assert (
        "cannot write (File too large); make room" in message and "finished shards stay" in message
    )
    assert len(list((tmp_path / "cache").glob("*.unfinished/0*"))) > 5
    prepare_corpus(config, tmp_path / "cache", options())
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def test_a_stalled_holder_of_the_lock_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "STALLED_SECONDS", 0.0)
    with (
        hold_lock(tmp_path / "lock", "the text"),
        pytest.raises(
            InputError, match=r"another process is preparing the text and has shown no sign of life"
        ),
        hold_lock(tmp_path / "lock", "the text"),
    ):
        pass


def test_an_epoch_trains_on_every_token_once(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    corpus = prepare_corpus(config_of(tmp_path / "data"), tmp_path / "cache", options())
    tokens, seq_len = corpus.texts[0].train[:], 8
    num_windows = (len(tokens) - 1) // seq_len
    batches = IslandBatches(corpus, seq_len, 0, 1, 1)
    read = Counter(
        tuple(batches.micro_batches(step, 0, 1, 1)[0][0].tolist()) for step in range(num_windows)
    )
    starts = range(0, num_windows * seq_len, seq_len)
    assert read == Counter(tuple(tokens[start : start + seq_len + 1].tolist()) for start in starts)


def test_the_document_mask_parts_documents_where_the_index_does(tmp_path: Path) -> None:
    write_texts(tmp_path / "data")
    corpus = prepare_corpus(config_of(tmp_path / "data"), tmp_path / "cache", options())
    text = corpus.texts[0].train
    assert isinstance(text, ShardedTokens)
    ends, length = text.document_ends(), 700
    for start in range(0, len(text) - length, length):
        cut = Cutter(torch.arange(length), length, corpus.eos_id)
        packing = cut.pack(torch.from_numpy(text[start : start + length].astype(np.int64))[None])
        by_index = np.searchsorted(ends, np.arange(start, start + length), side="right")
        assert np.array_equal(packing.sequences_BT[0], by_index - by_index[0])


@pytest.mark.parametrize(
    "content", ["{}", '{"num_read": 1, "more": 2}', '{"num_read": -1}', "[", '{"num_read": "1"}']
)
def test_a_damaged_shard_is_named(tmp_path: Path, content: str) -> None:
    write_texts(tmp_path / "data")
    config = config_of(tmp_path / "data")
    prepare_corpus(config, tmp_path / "cache", options())
    next((tmp_path / "cache").glob("*/00003/shard.json")).write_text(content)
    with pytest.raises(InputError, match=r"delete .*cache/files-\w+$"):
        prepare_corpus(config, tmp_path / "cache", options())
