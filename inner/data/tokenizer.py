"""Tokenizers: raw UTF-8 bytes, or any tokenizer of the `tokenizers` library."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from inner.data.sources.hub import require_on_hub
from inner.data.vocabulary.ends import EOS_NAMES, read_beside, read_from_hub
from inner.data.vocabulary.library import FILE_CURE, LibraryTokenizer
from inner.errors import InputError, refused
from inner.files import home_path
from inner.foreign.files import open_file, read_file

MAX_TOKENIZER_BYTES = 1 << 28
"""Largest size of a tokenizer.json. A tokenizer with 262,144 tokens has 33 MB."""

WELL_KNOWN = {"gpt2": 50257, "openai-community/gpt2": 50257}
"""Vocabulary sizes of tokenizers on the hub that will not change. They are needed on machines
without these tokenizers."""


class Tokenizer(Protocol):
    """Maps text to token ids below vocab_size and back. eos_id ends every document, and encode
    never returns it.

    >>> tokenizer: Tokenizer = build_tokenizer("bytes")
    >>> tokenizer.encode("Hi").tolist()
    [72, 105]
    >>> tokenizer.decode([72, 105, tokenizer.eos_id])
    'Hi'
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def first_id(self) -> int | None:
        """Id that is put before every document; None if there is none."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of the text, 1-D, uint8 or uint32, without eos. Special markers in
        the text are treated as plain text.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids, without special tokens."""
        ...

    def token_id(self, name: str) -> int | None:
        """Return the id of the token with this name; None if there is none."""
        ...

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        """Return the ids of each piece of a text. Together they are the ids of the whole text.
        `pieces`: text, whether it is a marker.

        A marker such as <|im_end|> becomes the special token of this name if there is one, and is
        text otherwise.
        """
        ...


class BytesTokenizer:
    """Ids 0-255 are UTF-8 bytes, 256 starts a prompt (unused in training), 257 is eos, 258 and 259
    are reserved.
    """

    vocab_size = 260
    bos_id = 256
    eos_id = 257
    first_id = None

    def encode(self, text: str) -> np.ndarray:
        """Return one id per byte, uint8. A lone surrogate, which has no UTF-8 bytes, becomes a
        question mark.
        """
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the bytes. Invalid UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", "replace")

    def token_id(self, name: str) -> int | None:
        """Return None, because bytes have no names."""
        return None

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        """Return the ids of each piece, uint32. There are no special tokens with names, so every
        marker is text.
        """
        return [self.encode(text).astype(np.uint32) for text, _ in pieces]


def build_tokenizer(name: str, eos: str | None = None, bos: str | None = None) -> Tokenizer:
    """Load `bytes`, a tokenizer.json by path, or a tokenizer of the hub by name.

    `eos` and `bos` are names of tokens, as in data.eos and data.bos. Raises InputError if the
    tokenizer does not exist, has no end-of-text token, or does not have the tokens `eos` and `bos`.
    """
    if name == "bytes":
        if eos is not None or bos is not None:
            raise InputError(
                "data.eos and data.bos name tokens of a tokenizer.json, but data.tokenizer is "
                "bytes; leave them out"
            )
        return BytesTokenizer()
    if _is_file_name(name):
        config = read_beside(_tokenizer_file(name).parent)
        return LibraryTokenizer(_load_file(name), name, config, eos, bos)
    return LibraryTokenizer(_load_from_hub(name), name, read_from_hub(name), eos, bos)


def known_vocab_size(name: str) -> int | None:
    """Return the vocabulary size of a tokenizer on the hub without using the network: from the
    cache or WELL_KNOWN, or None.
    """
    import huggingface_hub

    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:
        return None
    if isinstance(cached, str):
        return max(_load_file(cached).get_vocab(with_added_tokens=True).values()) + 1
    return WELL_KNOWN.get(name)


def describe_ends(tokenizer: Tokenizer) -> str:
    """Return a line for the user about where documents begin and end."""
    if not isinstance(tokenizer, LibraryTokenizer):
        return "documents end with the byte tokenizer's eos"
    begin = (
        ""
        if tokenizer.bos is None
        else f"begin with {tokenizer.bos} ({tokenizer.first_id}, data.bos) and "
    )
    text = f"documents {begin}end with {tokenizer.eos} ({tokenizer.eos_id}, {tokenizer.eos_source})"
    if not tokenizer.skips_bos:
        return text
    return (
        f"{text}; its tokenizer_config.json has add_bos_token: data.bos puts a token before "
        "each document here"
    )


def ends_identity(tokenizer: Tokenizer) -> list[int | None]:
    """Return ids that distinguish texts with other document ends. Empty if the ends are the same as
    in older versions of this program, so that their caches stay valid.
    """
    if not isinstance(tokenizer, LibraryTokenizer):
        return []
    usual = next((name for name in EOS_NAMES if tokenizer.token_id(name) is not None), None)
    is_usual = tokenizer.eos == usual and tokenizer.first_id is None
    return [] if is_usual else [tokenizer.eos_id, tokenizer.first_id]


def tokenizer_fingerprint(name: str) -> str:
    """Return the identity of the tokenizer: its name, or a hash of its file. Needs no network."""
    if name != "bytes" and _is_file_name(name):
        with open_file(_tokenizer_file(name)) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return name


def tokenizer_folder(name: str) -> Path | None:
    """Return the folder of a tokenizer.json given by path; None for `bytes` and for a name on the
    hub.
    """
    return _tokenizer_file(name).parent if name != "bytes" and _is_file_name(name) else None


def _is_file_name(name: str) -> bool:
    return name.endswith(".json") or home_path(name, "data.tokenizer").exists()


def _tokenizer_file(name: str) -> Path:
    path = home_path(name, "data.tokenizer")
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"data.tokenizer: the file {str(file)!r} does not exist (looked in {Path.cwd()}); "
            "allowed: bytes, the path of a tokenizer.json, or a name on the Hugging Face hub"
        )
    return file


def _load_file(name: str) -> tokenizers.Tokenizer:
    file = _tokenizer_file(name)
    with refused(f"data.tokenizer: {str(file)!r} is not a tokenizer.json", FILE_CURE):
        raw = read_file(file, MAX_TOKENIZER_BYTES, FILE_CURE)
        return tokenizers.Tokenizer.from_buffer(raw)


def _load_from_hub(name: str) -> tokenizers.Tokenizer:
    import huggingface_hub

    cure = (
        "check data.tokenizer and the network, name a tokenizer.json file, or use "
        "data.tokenizer=bytes"
    )
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    except ValueError as error:
        raise InputError(
            f"data.tokenizer: {name!r} is neither a file nor a valid name on the hub; {cure}"
        ) from error
    if isinstance(cached, str):
        return _load_file(cached)
    require_on_hub("model", name, cure)
    with refused(f"data.tokenizer: no tokenizer.json in {name!r}", cure):
        return tokenizers.Tokenizer.from_pretrained(name)
