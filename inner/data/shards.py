"""Token files in shards of bounded size, each with an index of its documents, read as if they were one file.

    00000/train.bin      token ids, uint16 or uint32; every document ends with eos
          train.ends     int64: where each document ends, in tokens from the shard's beginning
          heldout.bin  heldout.ends
          shard.json     its counts, as in Counts
    00001/...

A shard is written beside its place and moved there whole: it is there and finished, or it is not there.
"""

import json
import os
import shutil
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from inner.errors import InputError

SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")
COUNTS = "shard.json"


class Tokens(Protocol):
    """A row of token ids; a slice of it is an array. An array is one, too."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


class ShardedTokens:
    """The token files of one split, one after the other."""

    def __init__(self, pieces: Sequence[np.ndarray], ends: Sequence[np.ndarray]) -> None:
        """`ends` of each piece are counted from its beginning."""
        assert pieces and len(pieces) == len(ends), f"{len(pieces)} pieces, {len(ends)} indices"
        self._pieces = pieces
        self._ends = ends
        self._starts = list(accumulate(map(len, pieces), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: slice, /) -> np.ndarray:
        """The tokens of a range; mapped, not copied, where it lies in one shard."""
        start, stop, step = index.indices(len(self))
        assert step == 1, "a range has no gaps"
        piece = min(bisect_right(self._starts, start), len(self._pieces)) - 1
        found = [self._pieces[piece][start - self._starts[piece] : max(stop - self._starts[piece], 0)]]
        while self._starts[piece + 1] < stop:
            piece += 1
            found.append(self._pieces[piece][: stop - self._starts[piece]])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def document_ends(self) -> np.ndarray:
        """Where each document ends, int64; the last one's end is the number of tokens."""
        places = [ends + start for ends, start in zip(self._ends, self._starts, strict=False)]
        # What a limit of tokens has cut off the last document is not there.
        return np.minimum(np.concatenate(places), len(self))


@dataclass
class Counts:
    """What shards hold, one or all together."""

    num_read: int = 0
    """Documents of the source that they cover, those that had no place included."""
    train_documents: int = 0
    train_tokens: int = 0
    heldout_documents: int = 0
    heldout_tokens: int = 0
    heldout_bytes: int = 0
    """UTF-8 bytes of the held-out text."""

    def __add__(self, other: "Counts") -> "Counts":
        ours, theirs = asdict(self), asdict(other)
        return Counts(**{name: ours[name] + theirs[name] for name in ours})


@dataclass
class Unfinished:
    """A shard while it is filled, in memory."""

    counts: Counts = field(default_factory=Counts)
    tokens: dict[SplitName, bytearray] = field(default_factory=lambda: {split: bytearray() for split in SPLITS})
    ends: dict[SplitName, array] = field(default_factory=lambda: {split: array("q") for split in SPLITS})

    @property
    def num_tokens(self) -> int:
        return self.counts.train_tokens + self.counts.heldout_tokens

    def add_train(self, ids: np.ndarray) -> None:
        """Append a document's tokens, eos included."""
        self.counts.train_documents += 1
        self.counts.train_tokens += len(ids)
        self.tokens["train"] += ids.tobytes()
        self.ends["train"].append(self.counts.train_tokens)

    def add_heldout(self, ids: np.ndarray, num_bytes: int) -> None:
        """Append a held-out document whose text has so many bytes."""
        self.counts.heldout_documents += 1
        self.counts.heldout_tokens += len(ids)
        self.counts.heldout_bytes += num_bytes
        self.tokens["heldout"] += ids.tobytes()
        self.ends["heldout"].append(self.counts.heldout_tokens)


def publish_shard(folder: Path, number: int, shard: Unfinished) -> None:
    """Write the shard to disk, then move it to its place. One process at a time may call it. Raises OSError."""
    beside = folder / ".unfinished"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for split in SPLITS:
        _write(beside / f"{split}.bin", shard.tokens[split])
        _write(beside / f"{split}.ends", shard.ends[split].tobytes())
    _write(beside / COUNTS, json.dumps(asdict(shard.counts), indent=1).encode())
    beside.rename(shard_folder(folder, number))


def finished_shards(folder: Path) -> list[Counts]:
    """The counts of the shards that are there, from the first on. InputError: one is damaged."""
    found = []
    while shard_folder(folder, len(found)).exists():
        found.append(read_counts(shard_folder(folder, len(found))))
    return found


def read_counts(shard: Path) -> Counts:
    """What a shard holds. InputError: it cannot be read."""
    try:
        counts = Counts(**json.loads((shard / COUNTS).read_bytes()))
        if not all(isinstance(value, int) and value >= 0 for value in asdict(counts).values()):
            raise ValueError(f"counts that are none: {counts}")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{shard / COUNTS} is damaged ({error}); delete {shard.parent}") from None
    return counts


def open_split(folder: Path, split: SplitName, dtype: str, num_tokens: int) -> ShardedTokens:
    """The first num_tokens tokens of one split, mapped. InputError: a file is shorter than its shard's counts say."""
    pieces, ends, left = [], [], num_tokens
    for number, counts in enumerate(finished_shards(folder)):
        shard, sizes = shard_folder(folder, number), asdict(counts)
        tokens = _map(shard / f"{split}.bin", dtype, sizes[f"{split}_tokens"])
        pieces.append(tokens[:left])
        ends.append(_map(shard / f"{split}.ends", "int64", sizes[f"{split}_documents"]))
        left -= len(pieces[-1])
    if left:
        raise InputError(f"{folder}: {num_tokens - left} of {num_tokens} {split} tokens are there; delete it")
    return ShardedTokens(pieces, ends)


def shard_folder(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"{number:05}"


def _write(path: Path, data: bytes | bytearray) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _map(path: Path, dtype: str, length: int) -> np.ndarray:
    needed = length * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.exists() else 0
    if size != needed:
        raise InputError(f"{path}: {size} bytes, needs {needed}: the file is damaged; delete {path.parents[1]}")
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,)) if length else np.empty(0, dtype=dtype)
