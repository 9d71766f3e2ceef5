"""Ids of conversations are those of the templated text as a whole, whatever the tokenizer does at
its beginning.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from inner.data.chat.coding import CONTEXT
from inner.data.chat.encode import encode_conversation
from inner.data.chat.messages import Message, to_text
from inner.data.tokenizer import build_tokenizer

WORDS = ["hello world how are you user assistant fine thanks\n\n\nyes\n"] * 3
NAMES = ["<unk>", "</s>", "<|im_start|>", "<|im_end|>"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz\n\u2581|_<>?"]
CHAT = [Message("user", "hello world"), Message("assistant", "fine thanks")]
WHOLE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"


def train(path: Path, letters: Sequence[str] = LETTERS, **parts: object) -> Tokenizer:
    """A small BPE with a normalizer or pre-tokenizer, saved at `path`."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    for name, part in parts.items():
        setattr(made, name, part)
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + 100,
        special_tokens=NAMES,
        initial_alphabet=[*letters],
        show_progress=False,
    )
    made.train_from_iterator(WORDS, trainer)
    made.save(str(path))
    return made


def metaspace(path: Path, scheme: str) -> Tokenizer:
    return train(path, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False))


def llama2(path: Path) -> Tokenizer:
    parts = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    return train(path, normalizer=normalizers.Sequence(parts))


def byte_level(path: Path, **settings: bool) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(path, sorted(alphabet), pre_tokenizer=pre_tokenizers.ByteLevel(**settings))


def taking_spaces(path: Path) -> Tokenizer:
    """As in Phi-3: the end of a message takes the line break after it."""
    made = byte_level(path, add_prefix_space=False)
    changed = Tokenizer.from_str(made.to_str().replace('"rstrip": false', '"rstrip": true'))
    changed.save(str(path))
    return changed


TOKENIZERS = {
    "metaspace always": lambda path: metaspace(path, "always"),
    "metaspace first": lambda path: metaspace(path, "first"),
    "metaspace never": lambda path: metaspace(path, "never"),
    "llama 2": llama2,
    "bytes": lambda path: byte_level(path, add_prefix_space=False),
    "bytes with a space before": lambda path: byte_level(path, add_prefix_space=True),
    "bytes not cut into words": lambda path: byte_level(
        path, add_prefix_space=False, use_regex=False
    ),
    "markers that take spaces": taking_spaces,
}


def ids_of(path: Path, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """What a model reads of a conversation without the last eos, and what it learns."""
    coded = encode_conversation(build_tokenizer(str(path)), to_text(messages), "chatml")[:-1]
    return np.where(coded < 0, CONTEXT - coded, coded).tolist(), coded[coded >= 0].tolist()


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@pytest.mark.parametrize("answer", ["fine thanks", " fine", "\n\nyes\n", "yes \u4e16 \U0001f600"])
def test_ids_are_those_of_the_whole_text(tmp_path: Path, make, answer: str) -> None:
    made = make(tmp_path / "t.json")
    read, _ = ids_of(tmp_path / "t.json", [CHAT[0], Message("assistant", answer)])
    assert read == made.encode(WHOLE.format("hello world", answer), add_special_tokens=False).ids


LEARNED = {
    "metaspace always": ["fine\u2581", "than", "ks", "<|im_end|>"],
    "metaspace first": ["fine\u2581", "than", "ks", "<|im_end|>"],
    "llama 2": ["fine\u2581", "than", "ks", "<|im_end|>"],
    "bytes": ["fi", "ne", "\u0120thanks", "<|im_end|>"],
    "markers that take spaces": ["fi", "ne", "\u0120thanks", "<|im_end|>"],
}


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_is_the_assistants_part_of_the_whole(tmp_path: Path, name: str) -> None:
    made = TOKENIZERS[name](tmp_path / "t.json")
    _, learned = ids_of(tmp_path / "t.json", CHAT)
    assert [made.id_to_token(each) for each in learned] == LEARNED[name]


def test_a_space_is_put_before_the_first_word_alone_where_the_tokenizer_says_so(
    tmp_path: Path,
) -> None:
    made = metaspace(tmp_path / "t.json", "first")
    read, _ = ids_of(tmp_path / "t.json", CHAT)
    tokens = [made.id_to_token(each) for each in read]
    assert tokens[:3] == ["<|im_start|>", "user", "\n"]
    assert "\u2581user" not in tokens and "\u2581fine" not in tokens


def test_a_token_that_begins_in_the_header_is_read_and_not_learned(tmp_path: Path) -> None:
    made = byte_level(tmp_path / "t.json", add_prefix_space=False)
    read, learned = ids_of(tmp_path / "t.json", [CHAT[0], Message("assistant", "\n\nyes\n")])
    tokens = [made.id_to_token(each) for each in read]
    assert tokens[-6:] == ["\u010a\u010a", "\u010a", "yes", "\u010a", "<|im_end|>", "\u010a"]
    assert [made.id_to_token(each) for each in learned] == ["\u010a", "yes", "\u010a", "<|im_end|>"]


@pytest.mark.parametrize("is_special", [True, False])
def test_a_marker_that_somebody_writes_is_text(tmp_path: Path, is_special: bool) -> None:
    plain = tokenizers.Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(LETTERS)}, merges=[])
    )
    plain.add_tokens([AddedToken(name, special=is_special, normalized=False) for name in NAMES])
    plain.save(str(tmp_path / "t.json"))
    read, learned = ids_of(
        tmp_path / "t.json", [Message("user", "<|im_end|>"), Message("assistant", "<|im_start|>")]
    )
    end, start = plain.token_to_id("<|im_end|>"), plain.token_to_id("<|im_start|>")
    assert read.count(end) == read.count(start) == 2, "one for each message"
    assert learned.count(end) == 1 and start not in learned


def test_the_character_around_stand_ins_makes_no_marker(tmp_path: Path) -> None:
    made = byte_level(tmp_path / "t.json", add_prefix_space=False)
    read, _ = ids_of(
        tmp_path / "t.json", [Message("user", "\U0010ffff<|im_end|>\U0010ffff"), CHAT[1]]
    )
    assert read.count(made.token_to_id("<|im_end|>")) == 2
