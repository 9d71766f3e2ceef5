"""Byte and library tokenizers, and errors of unavailable tokenizers."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from inner.config import DataConfig
from inner.data.chat.encode import encode_conversation
from inner.data.chat.messages import parse_messages, to_text
from inner.data.corpus import check_source, prepare_corpus
from inner.data.tokenizer import BytesTokenizer, build_tokenizer, tokenizer_fingerprint
from inner.errors import InputError


def write_tokenizer(path: Path, specials: list[str]) -> None:
    """A byte-level BPE trained on a few words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox the lazy dog"] * 9, trainer)
    tokenizer.save(str(path))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back_as_the_text(text: str) -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(np.append(ids, [tokenizer.eos_id, tokenizer.bos_id])) == text


def test_bytes_have_260_ids() -> None:
    assert build_tokenizer(DataConfig().tokenizer).vocab_size == 260
    assert 255 < BytesTokenizer.bos_id < BytesTokenizer.eos_id < BytesTokenizer.vocab_size


def test_a_tokenizer_file_comes_back_as_the_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    tokenizer = build_tokenizer(str(tmp_path / "tokenizer.json"))
    text = "the quick dog \u00e9"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert max(ids) < tokenizer.vocab_size <= 300
    assert tokenizer.eos_id == 0


def test_eos_written_out_in_a_text_does_not_end_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", ["</s>"])
    tokenizer = build_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("the </s> fox")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "the </s> fox"


def test_a_corpus_is_written_with_a_tokenizer_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(20):
        (tmp_path / "data" / f"{i}.txt").write_text(f"the quick fox {i}")
    write_tokenizer(tmp_path / "t.json", ["<eos>"])
    config = DataConfig(
        source="files",
        paths=[f"{tmp_path}/data"],
        tokenizer=f"{tmp_path}/t.json",
        heldout_fraction=0.3,
    )
    check_source(config)
    corpus = prepare_corpus(config, tmp_path / "cache")
    assert corpus.vocab_size == build_tokenizer(config.tokenizer).vocab_size
    assert (
        np.count_nonzero(corpus.texts[0].train[:] == 0)
        + np.count_nonzero(corpus.texts[0].heldout[:] == 0)
        == 20
    )


def test_a_changed_tokenizer_file_has_another_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_tokenizer(path, ["<eos>"])
    before = tokenizer_fingerprint(str(path))
    write_tokenizer(path, ["</s>"])
    assert tokenizer_fingerprint(str(path)) != before


def change(path: Path, changes: dict[str, object]) -> str:
    """Replace parts of a tokenizer.json, given by a/b; return its path."""
    content = json.loads(path.read_text())
    for name, value in changes.items():
        *parents, key = name.split("/")
        part = content
        for parent in parents:
            part = part[parent]
        part[key] = value
    path.write_text(json.dumps(content))
    return str(path)


def padding(strategy: object) -> dict[str, object]:
    settings = {
        "direction": "Left",
        "pad_to_multiple_of": 64,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<eos>",
    }
    return {"padding": {"strategy": strategy, **settings}}


OWN_SETTINGS: dict[str, dict[str, object]] = {
    "truncation": {
        "truncation": {
            "direction": "Left",
            "max_length": 8,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    },
    "padding to the longest": padding("BatchLongest"),
    "padding to a length": padding({"Fixed": 4096}),
    "padding to a length that no memory holds": padding({"Fixed": 10**15}),
    "dropout": {"model/dropout": 0.5},
}


@pytest.mark.parametrize("changes", OWN_SETTINGS.values(), ids=OWN_SETTINGS.keys())
def test_ids_are_those_without_the_own_settings_of_a_tokenizer_file(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    for name in ("plain.json", "own.json"):
        write_tokenizer(tmp_path / name, ["<eos>"])
    plain = build_tokenizer(f"{tmp_path}/plain.json")
    own = build_tokenizer(change(tmp_path / "own.json", changes))
    text = "the quick brown fox " * 50
    assert own.encode(text).tolist() == plain.encode(text).tolist()
    chat = to_text(
        parse_messages(
            [{"role": "user", "content": text}, {"role": "assistant", "content": text}], "here"
        )
    )
    expected = encode_conversation(plain, chat, "chatml").tolist()
    assert encode_conversation(own, chat, "chatml").tolist() == expected


PANICS: dict[str, dict[str, object]] = {
    "when it is loaded": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "when it encodes": {
        "normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}
    },
    "when a word is cut": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "when a token is unknown": {
        "model": {"type": "Unigram", "unk_id": None, "vocab": [["<eos>", 0.0]]}
    },
}


@pytest.mark.parametrize("changes", PANICS.values(), ids=PANICS.keys())
def test_a_tokenizer_file_with_which_the_library_panics_is_named(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    write_tokenizer(tmp_path / "t.json", ["<eos>"])
    path = change(tmp_path / "t.json", changes)
    with pytest.raises(InputError, match=r"data.tokenizer: '.*t.json' (is not a|cannot encode)"):
        build_tokenizer(path).encode("the quick brown fox")


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t.json", ["[SEP]"])
    with pytest.raises(InputError, match=r"t.json' has no end-of-text token; needs one of </s>, "):
        build_tokenizer(f"{tmp_path}/t.json")


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no.json' does not exist .* allowed: bytes, the path of"):
        check_source(DataConfig(tokenizer=f"{tmp_path}/no.json"))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(InputError, match=r"t.json' is not a tokenizer.json"):
        check_source(DataConfig(tokenizer=f"{tmp_path}/t.json"))


def test_a_tokenizer_that_the_hub_cannot_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens on this port, so no name is looked up and nothing leaves the machine.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        InputError,
        match=r"model 'some/tokenizer' cannot be reached on the Hugging Face hub: .*bytes",
    ):
        check_source(DataConfig(tokenizer="some/tokenizer"))
