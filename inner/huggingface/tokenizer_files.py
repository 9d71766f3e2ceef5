"""Write a tokenizer as the files that `transformers` reads."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from inner.data.tokenizer import (
    MAX_TOKENIZER_BYTES,
    BytesTokenizer,
    build_tokenizer,
    tokenizer_folder,
)
from inner.data.vocabulary.ends import TOKENIZER_CONFIG, read_beside, token_name
from inner.data.vocabulary.library import LibraryTokenizer
from inner.foreign.files import read_file

TOKENIZER = "tokenizer.json"
COMPANIONS = (TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")
"""Files that may accompany a tokenizer.json."""
BYTE_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_0|>", "<|reserved_1|>")
"""Ids 256 to 259 of the byte tokenizer."""


def write_tokenizer(
    choice: tuple[str, str | None, str | None], folder: Path, seq_len: int
) -> tuple[int | None, int]:
    """Write a tokenizer and return (bos id or None, eos id). Raises InputError if it cannot be
    loaded.

    `choice`: the values of data.tokenizer, data.eos and data.bos.
    """
    name = choice[0]
    tokenizer = build_tokenizer(*choice)
    if isinstance(tokenizer, LibraryTokenizer):
        tokenizer.save(folder / TOKENIZER)
        bos_id = tokenizer.first_id
        beside = tokenizer_folder(name)
        for path in [] if beside is None else [beside / companion for companion in COMPANIONS]:
            if path.is_file():
                (folder / path.name).write_bytes(read_file(path, MAX_TOKENIZER_BYTES))
    else:
        byte_tokenizer().save(str(folder / TOKENIZER))
        bos_id = BytesTokenizer.bos_id
    if not (folder / TOKENIZER_CONFIG).exists():
        _write_config(folder, bos_id, tokenizer.eos_id, seq_len)
    if isinstance(tokenizer, LibraryTokenizer):
        bos_id = _say_ends(folder, tokenizer)
    return bos_id, tokenizer.eos_id


def _say_ends(folder: Path, tokenizer: LibraryTokenizer) -> int | None:
    """Write the eos and bos of the training into the folder's tokenizer_config.json; return the id
    of bos, or None.
    """
    told = read_beside(folder)
    ends: dict[str, object] = (
        {} if token_name(told, "eos_token") == tokenizer.eos else {"eos_token": tokenizer.eos}
    )
    if tokenizer.bos is not None:
        ends |= {"bos_token": tokenizer.bos, "add_bos_token": True}
    if ends:
        (folder / TOKENIZER_CONFIG).write_text(
            json.dumps(told | ends, indent=2) + "\n", encoding="utf-8"
        )
    bos = token_name(told | ends, "bos_token")
    return None if bos is None else tokenizer.token_id(bos)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Build BytesTokenizer as a library tokenizer: byte-level BPE without merges, whose ids are the
    byte values.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in BYTE_SPECIALS]
    )
    return tokenizer


def _byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level BPE: the byte itself, or else the
    next character from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_config(folder: Path, bos_id: int | None, eos_id: int, seq_len: int) -> None:
    """Write the tokenizer_config.json that AutoTokenizer needs beside tokenizer.json."""
    written = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": written.id_to_token(eos_id),
        **({} if bos_id is None else {"bos_token": written.id_to_token(bos_id)}),
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
        # As in training, special tokens that are spelled out in a text are plain text.
        "split_special_tokens": True,
    }
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
