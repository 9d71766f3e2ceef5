"""The common part of token files of all formats: ids that are mapped into memory, and the ends of
documents.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from inner.errors import InputError


@dataclass(frozen=True)
class TokenFile:
    """Token ids of one file, of any integer type, and the end of each document in it, int64.

    Ends count tokens from the start of the file. A format without document ends gives a single
    document.
    """

    path: Path
    tokens: np.ndarray
    ends: np.ndarray
    knows_documents: bool = True


def refuse(path: Path, problem: str) -> NoReturn:
    """Raise InputError for a file whose content does not fit its name."""
    raise InputError(f"data.paths: {path}: {problem}; write the file again, or name others")


def map_ids(path: Path, dtype: np.dtype, num_tokens: int | None = None) -> np.ndarray:
    """Map a file that contains only ids. Raises InputError if their number is not `num_tokens`,
    unless that is None.
    """
    size = path.stat().st_size
    expected = size // dtype.itemsize if num_tokens is None else num_tokens
    if size != expected * dtype.itemsize or not expected:
        refuse(
            path, f"it has {size} bytes, but {expected} ids of {dtype.itemsize} bytes are expected"
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(expected,))


def check_ends(path: Path, ends: np.ndarray, num_tokens: int) -> None:
    """Raise InputError unless the document ends increase up to the number of tokens."""
    if not len(ends) or ends[0] < 0 or ends[-1] != num_tokens or bool((np.diff(ends) < 0).any()):
        refuse(path, f"its document ends do not increase up to {num_tokens} tokens")
