"""Tokenizers: raw UTF-8 bytes, or any tokenizer of the `tokenizers` library."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from inner.data.chat.marked_text import MarkedText
from inner.data.sources.hub import require_on_hub
from inner.errors import InputError, summarise
from inner.files import home_path

EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
FILE_CURE = "save one with tokenizers.Tokenizer.save, or use data.tokenizer=bytes"


class Tokenizer(Protocol):
    """Maps text to token ids below vocab_size and back; eos_id ends every document and is never returned by encode.

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

    def encode(self, text: str) -> np.ndarray:
        """Token ids of the text, 1-D uint32, without eos. Special markers in the text are treated as plain text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids, without special tokens."""
        ...

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        """Ids of each piece of a text, which together are those of the whole. `pieces`: text, whether it is a marker.

        A marker such as <|im_end|> becomes the special token of this name if there is one, and is text otherwise.
        """
        ...


class BytesTokenizer:
    """Ids 0-255 are UTF-8 bytes, 256 starts a prompt (unused in training), 257 is eos, 258 and 259 are reserved."""

    vocab_size = 260
    bos_id = 256
    eos_id = 257

    def encode(self, text: str) -> np.ndarray:
        """One id per byte; a lone surrogate, which has no UTF-8 bytes, becomes a question mark."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the bytes; invalid UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", "replace")

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        """Bytes have no special tokens with names, so every marker is text."""
        return [self.encode(text) for text, _ in pieces]


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library that has an end-of-text token."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, name: str) -> None:
        # Otherwise the characters "</s>" inside a document would end it.
        tokenizer.encode_special_tokens = True
        _switch_off_what_changes_ids(tokenizer)
        # The library's threads do not survive a fork and compete with the island's other ranks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self._tokenizer, self._name = tokenizer, name
        self._marked: MarkedText | None = None
        self.eos_id = _find_eos(ids, name)
        # A vocabulary may have holes, so its count can lie below its highest id.
        self.vocab_size = max(ids.values()) + 1

    def encode(self, text: str) -> np.ndarray:
        """Ids from the library; a lone surrogate becomes a question mark. Raises InputError if the library fails."""
        clean = _without_surrogates(text)
        # encode_batch_fast computes no offsets and is a quarter faster than encode(); larger batches are slower.
        with _explain_failures(f"data.tokenizer: {self._name!r} cannot encode a text of {len(clean)} characters"):
            (encoding,) = self._tokenizer.encode_batch_fast([clean], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        with _explain_failures(f"data.tokenizer: {self._name!r} cannot decode {len(ids)} ids"):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        clean = [(_without_surrogates(text), is_marker) for text, is_marker in pieces]
        length = sum(len(text) for text, _ in clean)
        with _explain_failures(f"data.tokenizer: {self._name!r} cannot encode a text of {length} characters"):
            self._marked = self._marked or MarkedText(self._tokenizer)
            return self._marked.encode(clean)

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path))


def build_tokenizer(name: str) -> Tokenizer:
    """Load `bytes`, a tokenizer.json by path, or a tokenizer of the hub by name.

    Raises InputError if it does not exist or has no end-of-text token.
    """
    if name == "bytes":
        return BytesTokenizer()
    if _is_file_name(name):
        return LibraryTokenizer(_load_file(name), name)
    return LibraryTokenizer(_load_from_hub(name), name)


def tokenizer_fingerprint(name: str) -> str:
    """Identity of the tokenizer: its name, or a hash of its file; needs no network."""
    if name != "bytes" and _is_file_name(name):
        return hashlib.sha256(_tokenizer_file(name).read_bytes()).hexdigest()
    return name


def tokenizer_folder(name: str) -> Path | None:
    """Folder of a tokenizer.json given by path; None for `bytes` and for a name on the hub."""
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
    with _explain_failures(f"data.tokenizer: {str(file)!r} is not a tokenizer.json"):
        return tokenizers.Tokenizer.from_file(str(file))


def _load_from_hub(name: str) -> tokenizers.Tokenizer:
    import huggingface_hub

    cure = "check data.tokenizer and the network, name a tokenizer.json file, or use data.tokenizer=bytes"
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    except ValueError as error:
        raise InputError(f"data.tokenizer: {name!r} is neither a file nor a valid name on the hub; {cure}") from error
    if isinstance(cached, str):
        return _load_file(cached)
    require_on_hub("model", name, cure)
    with _explain_failures(f"data.tokenizer: no tokenizer.json in {name!r}", cure):
        return tokenizers.Tokenizer.from_pretrained(name)


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _switch_off_what_changes_ids(tokenizer: tokenizers.Tokenizer) -> None:
    """Truncation, padding and BPE's dropout, which a tokenizer.json keeps from the program that saved it.

    Truncation would lose the rest of a text, padding would be learned as text, and dropout would give each island
    other ids.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model.dropout = None


@contextmanager
def _explain_failures(complaint: str, cure: str = FILE_CURE) -> Iterator[None]:
    """Turn whatever the library raises into InputError."""
    try:
        yield
    except BaseException as error:
        # The library raises bare Exception, the hub what its HTTP library does; a panic of Rust is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{complaint}: {summarise(error)}; {cure}") from error


def _find_eos(ids: dict[str, int], name: str) -> int:
    for eos in EOS_NAMES:
        if eos in ids:
            return ids[eos]
    raise InputError(
        f"data.tokenizer {name!r} has no end-of-text token; needs one of {', '.join(EOS_NAMES)}; "
        "add one to the tokenizer.json or choose another tokenizer"
    )
