"""Text to token ids and back: raw bytes, or any tokenizer of the `tokenizers` library."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from inner.config import DataConfig
from inner.data.hub import one_line, require_on_hub
from inner.errors import InputError

EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")


class Tokenizer(Protocol):
    """Ids are below vocab_size; eos_id ends every document and never comes out of encode."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """The text's ids, 1-D uint32, without eos; markers written out in the text are plain text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special ones left out."""
        ...


class BytesTokenizer:
    """0-255: the UTF-8 bytes. 256: start of a prompt, not used in training text. 257: eos. 258, 259: reserved."""

    vocab_size = 260
    bos_id = 256
    eos_id = 257

    def encode(self, text: str) -> np.ndarray:
        """One id per byte; half a surrogate pair, which has no bytes, becomes a question mark."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace")


class LibraryTokenizer:
    """A tokenizer.json with an end-of-text token."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, name: str) -> None:
        # Else the characters "</s>" inside a document would end it.
        tokenizer.encode_special_tokens = True
        # Threads of the library do not survive a fork, and compete with the island's other ranks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self._tokenizer = tokenizer
        self.eos_id = _find_eos(ids, name)
        # A vocabulary may have holes, so its count can lie below its highest id.
        self.vocab_size = max(ids.values()) + 1

    def encode(self, text: str) -> np.ndarray:
        """The library's ids; half a surrogate pair becomes a question mark."""
        clean = text.encode("utf-8", "replace").decode("utf-8")
        # Without offsets, a quarter faster than encode(); one by one, as larger batches are slower.
        (encoding,) = self._tokenizer.encode_batch_fast([clean], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The library's text of ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, path: Path) -> None:
        """Write it as a tokenizer.json."""
        self._tokenizer.save(str(path))


def build_tokenizer(name: str) -> Tokenizer:
    """`bytes`, the path of a tokenizer.json, or a name on the hub. InputError: there is none, or it has no eos."""
    if name == "bytes":
        return BytesTokenizer()
    if _is_file_name(name):
        return LibraryTokenizer(_from_file(name), name)
    return LibraryTokenizer(_from_hub(name), name)


def vocab_size_of(config: DataConfig) -> int:
    """The model's vocabulary for this data; reads no text."""
    return build_tokenizer(config.tokenizer).vocab_size


def tokenizer_fingerprint(name: str) -> str:
    """What decides the ids: the name, or a hash of the file's content; never asks the network."""
    if name != "bytes" and _is_file_name(name):
        return hashlib.sha256(_file_of(name).read_bytes()).hexdigest()
    return name


def folder_of(name: str) -> Path | None:
    """Where the tokenizer.json that `name` is lies, with what belongs to it; None for `bytes` and for a hub's name."""
    return _file_of(name).parent if name != "bytes" and _is_file_name(name) else None


def _is_file_name(name: str) -> bool:
    return name.endswith(".json") or Path(name).expanduser().exists()


def _file_of(name: str) -> Path:
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"data.tokenizer: the file {str(file)!r} does not exist (looked in {Path.cwd()}); "
            "allowed: bytes, the path of a tokenizer.json, or a name on the Hugging Face hub"
        )
    return file


def _from_file(name: str) -> tokenizers.Tokenizer:
    file = _file_of(name)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        # The Rust library raises bare Exception.
        raise InputError(
            f"data.tokenizer: {str(file)!r} is no tokenizer.json: {one_line(error)}; "
            "save one with tokenizers.Tokenizer.save, or use data.tokenizer=bytes"
        ) from error


def _from_hub(name: str) -> tokenizers.Tokenizer:
    import huggingface_hub

    cure = "check data.tokenizer and the network, name a tokenizer.json file, or use data.tokenizer=bytes"
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    except ValueError as error:
        raise InputError(f"data.tokenizer: {name!r} is no file and no name on the hub; {cure}") from error
    if isinstance(cached, str):
        return _from_file(cached)
    require_on_hub("model", name, cure)
    try:
        return tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:
        # The Rust library raises bare Exception, the hub what its HTTP library raises.
        raise InputError(f"data.tokenizer: no tokenizer.json in {name!r}: {one_line(error)}; {cure}") from error


def _find_eos(ids: dict[str, int], name: str) -> int:
    for eos in EOS_NAMES:
        if eos in ids:
            return ids[eos]
    raise InputError(
        f"data.tokenizer {name!r} has no end-of-text token; needs one of {', '.join(EOS_NAMES)}; "
        "add one to the tokenizer.json or choose another tokenizer"
    )
