"""Token files of other programs: read as they are, cut at a document, refused when they are
damaged.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inner.config import DataConfig
from inner.data.batches import IslandBatches
from inner.data.corpus import check_source, prepare_corpus
from inner.data.shards import ShardedTokens
from inner.data.token_files.open_files import CheckedTokens, open_token_files
from inner.errors import InputError
from tests.inner.data.token_files_of_others import (
    DOCUMENTS,
    write_datatrove,
    write_megatron,
    write_numpy,
    write_olmo,
)

IDS = [token for document in DOCUMENTS for token in document]
WRITERS: list[Callable[..., Path]] = [write_megatron, write_datatrove, write_olmo, write_numpy]


def tokens_config(*paths: Path, **changes: object) -> DataConfig:
    values = {
        "source": "tokens",
        "paths": [str(path) for path in paths],
        "heldout_fraction": 0.2,
        "seq_len": 16,
    }
    return DataConfig.model_validate(values | changes)


@pytest.mark.parametrize("write", WRITERS)
def test_every_id_is_in_one_of_the_two_splits_in_order(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    config = tokens_config(write(tmp_path / "text"))
    check_source(config)
    (text,) = prepare_corpus(config, tmp_path / "cache").texts
    assert [*text.train[:].tolist(), *text.heldout[:].tolist()] == IDS
    assert 0.19 < len(text.heldout) / len(IDS) < 0.25
    assert not (tmp_path / "cache").exists(), "nothing is copied"


@pytest.mark.parametrize("write", [write_megatron, write_datatrove])
def test_what_is_held_out_begins_with_a_document(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    (text,) = prepare_corpus(tokens_config(write(tmp_path / "text")), tmp_path).texts
    assert text.train[:][-1] == 257
    held = bytes(token for token in text.heldout[:].tolist() if token < 256)
    assert text.heldout_bytes == len(held)


def test_the_formats_give_the_same_batches(tmp_path: Path) -> None:
    found = []
    for write in (write_megatron, write_datatrove):
        corpus = prepare_corpus(tokens_config(write(tmp_path / "text")), tmp_path)
        found.append(IslandBatches(corpus, 16, 0, 1, 4).micro_batches(3, 0, 1, 4)[0])
    assert bool((found[0] == found[1]).all())


def test_several_files_follow_each_other_in_the_order_of_paths(tmp_path: Path) -> None:
    first = write_megatron(tmp_path / "b", [[1, 257]] * 50)
    second = write_datatrove(tmp_path / "a", [[2, 257]] * 50)
    (text,) = prepare_corpus(tokens_config(first, second), tmp_path).texts
    assert text.train[:100].tolist() == [1, 257] * 50
    assert text.train[98:102].tolist() == [1, 257, 2, 257]


def test_max_tokens_shortens_what_is_trained_on(tmp_path: Path) -> None:
    (text,) = prepare_corpus(
        tokens_config(write_olmo(tmp_path / "text"), max_tokens=100), tmp_path
    ).texts
    assert text.train[:].tolist() == IDS[:100]


def test_a_split_keeps_every_document_end() -> None:
    tokens = ShardedTokens(
        [np.arange(4), np.arange(4, 7)], ends=[np.array([1, 4]), np.array([2, 3])]
    )
    for at in range(8):
        first, rest = tokens.split(at)
        assert [*first[:].tolist(), *rest[:].tolist()] == list(range(7))
        ends = [*first.document_ends(), *(rest.document_ends() + at)]
        assert sorted({*ends}) == sorted({1, 4, 6, 7, at} - {0})


def damaged_index(folder: Path) -> Path:
    path = write_megatron(folder / "text")
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-8])
    return path


def short_ids(folder: Path) -> Path:
    path = write_megatron(folder / "text")
    path.write_bytes(path.read_bytes()[:-2])
    return path


def no_index(folder: Path) -> Path:
    path = write_datatrove(folder / "text")
    path.with_name(f"{path.name}.index").unlink()
    return path


def odd_ids(folder: Path) -> Path:
    path = write_datatrove(folder / "text")
    path.write_bytes(path.read_bytes()[:-3])
    return path


def falling_ends(folder: Path) -> Path:
    path = write_datatrove(folder / "text", [[1, 2], [3]])
    path.with_name(f"{path.name}.index").write_bytes(np.array([5, 3], np.uint64).tobytes())
    return path


def fractions(folder: Path) -> Path:
    np.save(folder / "text.npy", np.ones(100))
    return folder / "text.npy"


def text_file(folder: Path) -> Path:
    (folder / "text.txt").write_text("some text")
    return folder / "text.txt"


@pytest.mark.parametrize(
    "damage, text",
    [
        (damaged_index, "120 sequences need"),
        (short_ids, "ids of 2 bytes are expected"),
        (no_index, "there is no text.ds.index beside it"),
        (odd_ids, "an id has 2 or 4"),
        (falling_ends, "its document ends do not increase"),
        (fractions, "holds float64 of shape (100,)"),
        (text_file, "for text set data.source=files"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, damage: Callable[[Path], Path], text: str
) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        check_source(tokens_config(damage(tmp_path)))


def test_ids_of_another_tokenizer_are_refused_when_they_are_read(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "text", [[5, 6, 7, 50256]] * 300)
    with pytest.raises(
        InputError, match=r"holds the id 50256, but data\.tokenizer has the ids 0 to 259"
    ):
        prepare_corpus(tokens_config(path), tmp_path)


ROW = np.random.default_rng(0).integers(1, 50_000, 4000)


@pytest.mark.parametrize("vocab_size, written", [
    (300, "uint16"), (50_257, "uint16"), (50_257, "uint32"), (50_257, "int64"),
    (128_256, "uint32"), (128_256, "int64"), (128_256, "uint16"),
])  # fmt: skip
def test_ids_without_a_header_are_read_with_the_width_that_they_have(
    tmp_path: Path, vocab_size: int, written: str
):
    ids = ROW % vocab_size
    ids.astype(written).tofile(tmp_path / "a.npy")
    (file,) = open_token_files([str(tmp_path / "a.npy")], vocab_size)
    assert file.tokens.tolist() == ids.tolist()


def test_another_width_than_the_tokenizer_suggests_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    ROW.astype("uint32").tofile(tmp_path / "a.npy")
    open_token_files([str(tmp_path)], 50_257)
    assert (
        "a.npy: its content shows that its ids have 4 bytes, and not 2 as the tokenizer with 50257 "
        "ids" in caplog.text
    )


def test_ids_of_a_larger_tokenizer_are_not_taken_for_narrower_ones(tmp_path: Path):
    ids = np.random.default_rng(0).integers(0, 256_000, 4000)
    ids.astype("uint32").tofile(tmp_path / "a.npy")
    with pytest.raises(
        InputError, match=r"holds the id \d+, but data.tokenizer has the ids 0 to 128255"
    ):
        CheckedTokens(open_token_files([str(tmp_path)], 128_256)[0].tokens, 128_256)[:4000]


def test_single_ids_between_ends_are_not_taken_for_wider_ones(tmp_path: Path):
    np.array([5, 0, 6, 0, 7, 0], np.uint16).tofile(tmp_path / "a.npy")
    assert open_token_files([str(tmp_path)], 300)[0].tokens.tolist() == [5, 0, 6, 0, 7, 0]
