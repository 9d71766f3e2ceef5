"""Which tokens end and begin a document: by the user, by tokenizer_config.json, by their names."""

import json
import logging
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diloco.config.schema import parse_config
from inner.config import DataConfig
from inner.data.chat.coding import CONTEXT
from inner.data.chat.encode import encode_conversation
from inner.data.chat.messages import Message, to_text
from inner.data.corpus import prepare_corpus, text_identity
from inner.data.prepare import PrepareOptions
from inner.data.streaming.make import new_index
from inner.data.tokenizer import build_tokenizer, describe_ends
from inner.errors import InputError

PHI3 = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
OPENHERMES = ["<unk>", "<s>", "</s>", "<|im_end|>"]
DEEPSEEK = ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]
COMMAND_R = ["<BOS_TOKEN>", "<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"]
NANOCHAT = ["<|bos|>", "<|user_start|>"]


def write(folder: Path, names: list[str], config: object = None) -> str:
    """A tokenizer whose special tokens have the first ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate([*names, *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made.add_special_tokens([AddedToken(name) for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("names", "told", "expected"),
    [
        (PHI3, "<|endoftext|>", 3),
        (OPENHERMES, {"content": "<|im_end|>", "lstrip": False}, 3),
        (DEEPSEEK, DEEPSEEK[1], 1),
        (COMMAND_R, "<|END_OF_TURN_TOKEN|>", 2),
        (PHI3, None, 2),
    ],
)
def test_eos_is_what_tokenizer_config_says_and_else_the_first_known_name(
    tmp_path, names, told, expected
):
    folder = write(tmp_path, names, {"eos_token": told})
    assert build_tokenizer(folder).eos_id == expected
    assert build_tokenizer(f"{folder}/tokenizer.json").eos_id == expected


def test_the_users_eos_counts_more_than_tokenizer_config(tmp_path):
    folder = write(tmp_path, PHI3, {"eos_token": "<|endoftext|>"})
    assert build_tokenizer(folder, "</s>").eos_id == 2
    assert build_tokenizer(write(tmp_path / "nanochat", NANOCHAT), "<|bos|>").eos_id == 0


def test_it_is_said_which_was_taken(tmp_path):
    folder = write(tmp_path, PHI3, {"eos_token": "<|endoftext|>", "add_bos_token": True})
    text = (
        "documents end with <|endoftext|> (3, tokenizer_config.json); its "
        "tokenizer_config.json has add_bos_token"
    )
    assert describe_ends(build_tokenizer(folder)).startswith(text)
    assert describe_ends(build_tokenizer(folder, "</s>", "<s>")) == (
        "documents begin with <s> (1, data.bos) and end with </s> (2, data.eos)"
    )
    assert (
        describe_ends(build_tokenizer(write(tmp_path / "b", PHI3)))
        == "documents end with </s> (2, by its name)"
    )


@pytest.mark.parametrize(
    ("names", "config", "eos", "bos", "text"),
    [
        (
            NANOCHAT,
            None,
            None,
            None,
            "name one of its tokens by data.eos, such as <|bos|>, <|user_start|>",
        ),
        (
            PHI3,
            None,
            "<eos>",
            None,
            "data.eos names '<eos>', which is not a token of data.tokenizer",
        ),
        (PHI3, None, None, "<bos>", "data.bos names '<bos>'"),
        (
            PHI3,
            {"eos_token": "<|end|>"},
            None,
            None,
            "tokenizer_config.json names '<|end|>', which is not a token",
        ),
        (PHI3, ["</s>"], None, None, "tokenizer_config.json: got a JSON list, need an object"),
    ],
)
def test_a_token_that_is_not_there_is_named(tmp_path, names, config, eos, bos, text):
    with pytest.raises(InputError, match=re.escape(text)):
        build_tokenizer(write(tmp_path, names, config), eos, bos)


def test_a_damaged_tokenizer_config_is_named(tmp_path):
    folder = write(tmp_path, PHI3)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(
        InputError, match=r"tokenizer_config\.json: cannot be read \(JSONDecodeError"
    ):
        build_tokenizer(folder)


def test_bytes_have_no_names():
    with pytest.raises(InputError, match=r"data\.eos and data\.bos name tokens of a tokenizer"):
        build_tokenizer("bytes", "</s>")


def text_config(tmp_path: Path, **changes: object) -> DataConfig:
    (tmp_path / "text").mkdir(exist_ok=True)
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text("ab")
    tokenizer = write(tmp_path / "t", PHI3, {"eos_token": "<|endoftext|>"})
    values = {
        "source": "files",
        "paths": [f"{tmp_path}/text"],
        "tokenizer": tokenizer,
        "heldout_fraction": 0.3,
    }
    return DataConfig.model_validate(values | changes)


@pytest.mark.parametrize("processes", [1, 2])
def test_every_document_begins_with_bos_and_ends_with_eos(tmp_path, processes: int, caplog):
    config = text_config(tmp_path, bos="<s>")
    caplog.set_level(logging.INFO)
    corpus = prepare_corpus(config, tmp_path / "cache", PrepareOptions(processes))
    ab = build_tokenizer(config.tokenizer).encode("ab").tolist()
    assert corpus.texts[0].train[:8].tolist() == 2 * [1, *ab, 3]
    assert corpus.eos_id == 3
    assert (
        "documents begin with <s> (1, data.bos) and end with <|endoftext|> (3, "
        "tokenizer_config.json)" in caplog.text
    )


def test_without_a_bos_documents_are_as_before(tmp_path):
    config = text_config(tmp_path)
    (text,) = prepare_corpus(config, tmp_path / "cache").texts
    assert text.train[:6].tolist() == 2 * [
        *build_tokenizer(config.tokenizer).encode("ab").tolist(),
        3,
    ]


def test_a_conversation_begins_with_one_bos(tmp_path):
    names = [*PHI3, "<|begin_of_text|>"]
    chat = to_text([Message("user", "a"), Message("assistant", "b")])
    for template, bos, expected in (("chatml", "<s>", 1), ("llama3", "<|begin_of_text|>", 4)):
        coded = encode_conversation(
            build_tokenizer(write(tmp_path, names), None, bos), chat, template
        )
        assert coded[0] == CONTEXT - expected and coded[1] != coded[0]


def test_other_ends_are_another_text_in_the_cache_and_usual_ones_the_same_as_before(tmp_path):
    config = text_config(tmp_path)
    configs = [
        config,
        *(config.model_copy(update=change) for change in ({"eos": "</s>"}, {"bos": "<s>"})),
    ]
    assert len({text_identity(each, []) for each in configs}) == 3
    (tmp_path / "t" / "tokenizer_config.json").unlink()
    named = config.model_copy(update={"eos": "</s>"})
    assert text_identity(config, []) == text_identity(named, []) == text_identity(configs[1], [])


def test_shards_are_made_with_the_users_eos(tmp_path):
    assert new_index(text_config(tmp_path, eos="<unk>"), "0" * 16).eos_id == 0


def test_eos_and_bos_are_in_the_hash_of_a_run_only_where_they_are_set():
    hashes = [
        parse_config("", [f"data.{key}"]).run.hash
        for key in ("eos=null", "bos=null", "eos=a", "bos=a")
    ]
    both = parse_config("", ["data.eos=a", "data.bos=a"]).run.hash
    assert hashes[0] == hashes[1] == parse_config("").run.hash == "e6ce1fd6727c23d23c1c8ebfb9aa48d7"
    assert len({*hashes, both}) == 4


def on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, config: object) -> str:
    """A tokenizer in the cache of the hub, which itself cannot be reached."""
    folder = tmp_path / f"models--some--{name}"
    write(folder / "snapshots" / "abc", PHI3, config)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    return f"some/{name}"


def test_tokenizer_config_of_the_hub_is_read(tmp_path, monkeypatch):
    assert (
        build_tokenizer(
            on_the_hub(tmp_path, monkeypatch, "with", {"eos_token": "<|endoftext|>"})
        ).eos_id
        == 3
    )


def test_a_tokenizer_config_that_the_hub_cannot_give_is_warned_of(tmp_path, monkeypatch, caplog):
    assert build_tokenizer(on_the_hub(tmp_path, monkeypatch, "without", None)).eos_id == 2
    assert "some/without: its tokenizer_config.json cannot be read" in caplog.text
    assert "so eos is chosen by its name; to be sure, set data.eos" in caplog.text
