"""Conversations: what is learned of them, how they are packed, and which rows are refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diloco.runtime.evaluation import mean_loss
from inner.config import DataConfig
from inner.data.batches import IslandBatches, heldout_windows
from inner.data.chat.coding import CONTEXT, IGNORE
from inner.data.chat.encode import encode_conversation, fit, place
from inner.data.chat.messages import Message, parse_messages, to_text
from inner.data.corpus import Text, prepare_corpus
from inner.data.micro_batch import Cutter, decode, num_targets
from inner.data.streaming.make import make_shards, new_index
from inner.data.tokenizer import BytesTokenizer, build_tokenizer
from inner.errors import InputError

SEQ_LEN = 128
EOS = BytesTokenizer.eos_id


def conversation(number: int) -> list[dict[str, str]]:
    question = {"role": "user", "content": f"what is {number} and one?"}
    return [question, {"role": "assistant", "content": f"it is {number + 1}"}]


def chat_config(folder: Path, count: int = 60, **changes: object) -> DataConfig:
    folder.mkdir(exist_ok=True)
    rows = "".join(json.dumps({"messages": conversation(number)}) + "\n" for number in range(count))
    (folder / "chat.jsonl").write_text(rows)
    values = {
        "source": "files",
        "paths": [str(folder)],
        "format": "chat",
        "seq_len": SEQ_LEN,
        "heldout_fraction": 0.2,
    }
    return DataConfig.model_validate(values | changes)


def read_and_learned(coded: np.ndarray) -> tuple[str, str]:
    """The text that a model reads, and that of the targets."""
    tokens, targets = decode(torch.from_numpy(coded.astype(np.int64))[None])
    tokenizer = BytesTokenizer()
    return tokenizer.decode(tokens[0].tolist()), tokenizer.decode(targets[0].tolist())


def test_the_assistants_words_and_the_end_of_its_message_are_learned() -> None:
    messages = parse_messages(conversation(4), "a row")
    coded = encode_conversation(BytesTokenizer(), to_text(messages), "chatml")
    read, learned = read_and_learned(coded)
    assert read == (
        "<|im_start|>user\nwhat is 4 and one?<|im_end|>\n<|im_start|>assistant\nit is 5<|im_end|>\n"
    )
    assert learned == "it is 5<|im_end|>"
    assert coded[-1] == CONTEXT - EOS, "the end is read, for masks between documents"


def test_markers_are_the_tokenizers_special_tokens_and_users_cannot_write_them(
    tmp_path: Path,
) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made.add_special_tokens(
        [AddedToken(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(str(tmp_path / "tokenizer.json"))
    end = made.token_to_id("<|im_end|>")
    text = to_text([Message("user", "<|im_end|>"), Message("assistant", "no")])
    tokens, targets = decode(
        torch.from_numpy(encode_conversation(tokenizer, text, "chatml").astype(np.int64))[None]
    )
    assert tokens[0].tolist().count(end) == 2, "one for each message"
    assert targets[0].tolist().count(end) == 1


def test_llama3_has_headers_for_each_message() -> None:
    text = to_text([Message("system", "be brief"), Message("assistant", " yes ")])
    read, learned = read_and_learned(encode_conversation(BytesTokenizer(), text, "llama3"))
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert (
        read == f"<|begin_of_text|>{header.format('system')}be "
        f"brief<|eot_id|>{header.format('assistant')}yes<|eot_id|>"
    )
    assert learned == "yes<|eot_id|>"


def sequences_of(text: Text) -> list[tuple[str, str]]:
    whole = text.train[:]
    return [read_and_learned(whole[at : at + SEQ_LEN]) for at in range(0, len(whole) - 1, SEQ_LEN)]


def test_no_conversation_crosses_the_border_of_a_sequence(tmp_path: Path) -> None:
    (text,) = prepare_corpus(chat_config(tmp_path / "text"), tmp_path / "cache").texts
    assert (len(text.train) - 1) % SEQ_LEN == 0
    for read, learned in sequences_of(text):
        assert read.startswith("<|im_start|>user") and read.count(
            "<|im_start|>user"
        ) == learned.count("it is")
        assert read.endswith("<|im_end|>\n")


def test_a_conversation_moves_to_the_next_sequence() -> None:
    coded = np.arange(10, dtype=np.int32)
    assert place(coded, 20, 16).tolist() == coded.tolist(), "it fits"
    assert place(coded, 7, 16).tolist() == [IGNORE] * 9 + coded.tolist()


def test_a_long_conversation_is_cut_and_left_out_if_nothing_of_it_is_learned() -> None:
    coded = np.array([*[CONTEXT] * 4, 1, 2, 3, 4], np.int32)
    assert fit(coded, 8).coded is coded and not fit(coded, 8).is_cut
    cut = fit(coded, 5)
    assert (cut.coded.tolist(), cut.is_cut, cut.learned_share) == (coded[:5].tolist(), True, 0.25)
    assert fit(coded, 4).coded.tolist() == []


def test_targets_are_learned_tokens_only(tmp_path: Path) -> None:
    corpus = prepare_corpus(chat_config(tmp_path / "text"), tmp_path / "cache")
    (window,) = IslandBatches(corpus, SEQ_LEN, 0, 1, 2).micro_batches(0, 0, 1, 2)
    batch = Cutter(torch.arange(SEQ_LEN), SEQ_LEN, EOS)(window)
    assert batch.tokens_BS[batch.tokens_BS != IGNORE].min() >= 0, "users' words are read"
    assert num_targets(window) == int((batch.targets_BS >= 0).sum()) < SEQ_LEN
    assert batch.packing is not None and batch.packing.longest < SEQ_LEN, (
        "documents end where their eos is"
    )


def test_plain_text_is_cut_as_before() -> None:
    window = torch.arange(2 * (SEQ_LEN + 1)).view(2, -1)
    tokens, targets = decode(window)
    assert tokens is window and targets is window


def test_bits_per_byte_are_of_the_assistants_bytes(tmp_path: Path) -> None:
    corpus = prepare_corpus(chat_config(tmp_path / "text"), tmp_path / "cache")
    heldout = corpus.texts[0].heldout[:]
    learned = read_and_learned(heldout)[1]
    num_learned = int((heldout >= 0).sum())
    assert corpus.heldout_tokens_per_byte == pytest.approx(
        num_learned / len(learned.replace("<|im_end|>", "").encode()), rel=1e-3
    )
    assert list(heldout_windows(corpus, SEQ_LEN, 1000, 0, 1, 1))


def test_the_same_bits_by_one_process_and_after_a_resume_of_small_shards(tmp_path: Path) -> None:
    from inner.data.prepare import PrepareOptions

    config = chat_config(tmp_path / "text")
    one = prepare_corpus(config, tmp_path / "one").texts[0]
    small = prepare_corpus(config, tmp_path / "small", PrepareOptions(shard_tokens=500)).texts[0]
    assert one.train[:].tolist() == small.train[:].tolist()
    assert one.heldout[:].tolist() == small.heldout[:].tolist()


def test_sharegpt_names_are_known() -> None:
    found = parse_messages(
        [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "a row"
    )
    assert found == [Message("user", "a"), Message("assistant", "b")]


@pytest.mark.parametrize(
    "value, text",
    [
        ("text", "got str, need a list of messages"),
        ([{"role": "tool", "content": "x"}], "message 0: got role='tool'"),
        ([{"role": "user", "content": None}], "content of NoneType"),
        ([{"speaker": "a"}], "got ['speaker'], need `role` and `content`"),
    ],
)
def test_other_rows_are_refused(value: object, text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        parse_messages(value, "a row")


def test_chat_needs_a_source_with_rows() -> None:
    with pytest.raises(
        ValueError, match="format chat needs the rows of source files or huggingface"
    ):
        DataConfig.model_validate({"format": "chat"})


LONG = "the quick brown fox jumps over the lazy dog " * 60


def cut_config(
    folder: Path, questions: dict[str, int], answer: str = "hello", **changes: object
) -> DataConfig:
    """Rows with these questions, each so many times, and one answer."""
    folder.mkdir(exist_ok=True)
    rows = [question for question, number in questions.items() for _ in range(number)]
    chats = [
        [{"role": "user", "content": row}, {"role": "assistant", "content": answer}] for row in rows
    ]
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    values = {
        "source": "files",
        "paths": [str(folder)],
        "format": "chat",
        "seq_len": SEQ_LEN,
        "heldout_fraction": 0.2,
    }
    return DataConfig.model_validate(values | changes)


def test_conversations_whose_answers_are_cut_off_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = cut_config(tmp_path / "text", {LONG: 380, "hi": 20})
    (text,) = prepare_corpus(config, tmp_path / "cache").texts
    assert (
        "of 400 conversations, 380 are left out, because their answers begin after "
        "data.seq_len=128 tokens, and 0 are" in (caplog.text)
    )
    for tokens in (text.train[:], text.heldout[:]):
        windows = [tokens[at : at + SEQ_LEN + 1] for at in range(0, len(tokens) - 1, SEQ_LEN)]
        assert all(
            num_targets(torch.from_numpy(window.astype(np.int64))[None]) for window in windows
        )
    learned = read_and_learned(np.concatenate([text.train[:], text.heldout[:]]))[1]
    assert learned == "hello<|im_end|>" * 20


def test_the_same_conversations_are_left_out_of_shards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = cut_config(
        tmp_path / "text", {LONG: 30, "hi": 40}, order="shards", shard_tokens=SEQ_LEN * 4
    )
    whole = prepare_corpus(config.model_copy(update={"order": "global"}), tmp_path / "cache").texts[
        0
    ]
    caplog.clear()
    made = list(make_shards(config, new_index(config, "0" * 16), 0, 1, lambda share: None))
    joined = np.concatenate([*(shard.ids[:-1] for shard in made), made[-1].ids[-1:]])
    assert joined.tolist() == whole.train[:].tolist()
    assert "conversations, 30 are left out" in caplog.text


def test_where_all_answers_are_cut_off_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"of 9 conversations, 9 are left out.*: give more text, raise data\.seq_len",
    ):
        prepare_corpus(cut_config(tmp_path / "text", {LONG: 9}), tmp_path / "cache")


def test_bits_per_byte_count_the_words_that_are_left_of_a_cut_answer(tmp_path: Path) -> None:
    config = cut_config(tmp_path / "text", {"hi": 40}, LONG)
    (text,) = prepare_corpus(config, tmp_path / "cache").texts
    assert text.heldout_bytes / len(text.heldout) == pytest.approx(1.0, rel=0.02), "a byte a token"


def test_held_out_windows_without_anything_learned_are_an_error_that_says_so() -> None:
    with pytest.raises(
        InputError, match=r"evaluate\.tokens=64: this number of held-out tokens contains no target"
    ):
        mean_loss([(0.0, 0)], 64)
    assert mean_loss([(3.0, 2), (1.0, 2)], 64) == 1.0
