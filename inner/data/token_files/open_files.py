"""Find token files by data.paths, and check the ids that are read from them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from inner.data.sources.find import distinct, find_files
from inner.data.token_files.arrays import open_array
from inner.data.token_files.datatrove import open_datatrove
from inner.data.token_files.megatron import open_megatron
from inner.data.token_files.token_file import TokenFile
from inner.errors import InputError, refused


def open_token_files(paths: Sequence[str], vocab_size: int) -> list[TokenFile]:
    """Open all token files that `paths` name: files, folders or patterns. Each file is opened once.

    The files are in the order of `paths`, and sorted within a folder or pattern. If a file does not
    record the type of its ids, `vocab_size` or the content suggests their width. Raises InputError
    if there are no files or one is damaged.
    """
    formats: dict[str, Callable[[Path], TokenFile]] = {
        ".bin": open_megatron,
        ".ds": open_datatrove,
        ".npy": lambda path: open_array(path, vocab_size),
    }
    if not paths:
        raise InputError(
            "data.source=tokens needs data.paths, got none; name .bin, .ds or .npy files, or "
            "folders of them"
        )
    found, _ = distinct(file for entry in paths for file in find_files(entry))
    opened = [_open(path, formats[path.suffix]) for _, path in found if path.suffix in formats]
    if not opened:
        raise InputError(
            f"data.paths {list(paths)}: none of the {len(found)} files found is a token file; "
            "data.source=tokens reads "
            ".bin with .idx (Megatron), .ds with .ds.index (datatrove) and .npy; for text set "
            "data.source=files"
        )
    return opened


def _open(path: Path, open_format: Callable[[Path], TokenFile]) -> TokenFile:
    with refused(f"data.paths: {path}: cannot be read", "write the file again, or name others"):
        return open_format(path)


class Ids(Protocol):
    """Token ids whose slices are arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


class CheckedTokens:
    """Token ids from other programs. Each id is checked to belong to the run's tokenizer when it is
    read.
    """

    def __init__(self, tokens: Ids, vocab_size: int) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: slice, /) -> np.ndarray:
        ids = self._tokens[index]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise InputError(
                f"data.source=tokens: a token file holds the id {int(ids.max())}, but "
                "data.tokenizer has the ids 0 to "
                f"{self._vocab_size - 1}: name the tokenizer with which the files were written"
            )
        return ids
