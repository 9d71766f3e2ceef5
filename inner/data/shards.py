"""Token files in shards of bounded size, with an index of their documents, readable as if they were
one file.

    00000/train.bin      token ids, uint16 or uint32; every document ends with eos
          train.ends     int64: end of each document, in tokens from the start of the shard
          heldout.bin  heldout.ends
          shard.json     totals of the shard, see ShardCounts
    00001/...

A shard is written to a neighbouring folder and renamed when complete, so every folder with the name
of a shard is finished.
"""

import json
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
from inner.files import write_synced

SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")
COUNTS = "shard.json"


class Tokens(Protocol):
    """A sequence of token ids whose slices are arrays, for example a numpy array."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> np.ndarray: ...


class ShardedTokens:
    """The token files of one split, concatenated.

    >>> files = [np.array([5, 6]), np.array([7])]
    >>> tokens = ShardedTokens(files, ends=[np.array([2]), np.array([1])])
    >>> tokens[1:3].tolist(), tokens.document_ends().tolist()
    ([6, 7], [2, 3])
    """

    def __init__(self, pieces: Sequence[np.ndarray], ends: Sequence[np.ndarray]) -> None:
        """Join `pieces`. `ends` are the document ends of each piece, counted from the start of that
        piece.
        """
        assert pieces and len(pieces) == len(ends), f"{len(pieces)} pieces, {len(ends)} indices"
        self._pieces = pieces
        self._ends = ends
        self._starts = list(accumulate(map(len, pieces), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: slice, /) -> np.ndarray:
        """Return the tokens of a range without a step. The result is a mapped view, not a copy, if
        one shard holds the range.
        """
        start, stop, step = index.indices(len(self))
        assert step == 1, f"got step {step}, need 1"
        piece = min(bisect_right(self._starts, start), len(self._pieces)) - 1
        slices = [
            self._pieces[piece][start - self._starts[piece] : max(stop - self._starts[piece], 0)]
        ]
        while self._starts[piece + 1] < stop:
            piece += 1
            slices.append(self._pieces[piece][: stop - self._starts[piece]])
        return slices[0] if len(slices) == 1 else np.concatenate(slices)

    def split(self, at: int) -> "tuple[ShardedTokens, ShardedTokens]":
        """Return the first `at` tokens, and the rest. A document that crosses the cut is divided
        between the two.
        """
        pieces: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        indices: tuple[list[np.ndarray], list[np.ndarray]] = [], []
        for piece, ends, start in zip(self._pieces, self._ends, self._starts, strict=False):
            cut = min(max(at - start, 0), len(piece))
            pieces[0].append(piece[:cut])
            pieces[1].append(piece[cut:])
            indices[0].append(np.append(ends[ends < cut], cut) if cut else ends[:0])
            indices[1].append(ends[ends > cut] - cut)
        return ShardedTokens(pieces[0], indices[0]), ShardedTokens(pieces[1], indices[1])

    def document_ends(self) -> np.ndarray:
        """Return the end of each document, int64. The last end is the number of tokens."""
        absolute = [ends + start for ends, start in zip(self._ends, self._starts, strict=False)]
        # A limit on the number of tokens may have cut off the end of the last document.
        return np.minimum(np.concatenate(absolute), len(self))


@dataclass
class ShardCounts:
    """Totals of one shard, or of several together."""

    num_read: int = 0
    """Number of documents read from the source, including documents that were left out because
    their split was full."""
    train_documents: int = 0
    train_tokens: int = 0
    heldout_documents: int = 0
    heldout_tokens: int = 0
    heldout_bytes: int = 0
    """Number of UTF-8 bytes of the held-out text."""
    unlearned: int = 0
    """Number of conversations that were left out because all their answers lie after the end of a
    sequence."""
    cut: int = 0
    """Number of conversations whose end was left out."""

    def __add__(self, other: "ShardCounts") -> "ShardCounts":
        ours = asdict(self)
        theirs = asdict(other)
        return ShardCounts(**{name: ours[name] + theirs[name] for name in ours})


@dataclass
class ShardBuilder:
    """A shard that is being collected in memory."""

    counts: ShardCounts = field(default_factory=ShardCounts)
    tokens: dict[SplitName, list[np.ndarray]] = field(
        default_factory=lambda: {split: [] for split in SPLITS}
    )
    """An array of each document, because one that grows would be copied again and again."""
    ends: dict[SplitName, array] = field(
        default_factory=lambda: {split: array("q") for split in SPLITS}
    )

    @property
    def num_tokens(self) -> int:
        return self.counts.train_tokens + self.counts.heldout_tokens

    def add_train(self, ids: np.ndarray) -> None:
        """Append the tokens of a training document, eos included."""
        self.counts.train_documents += 1
        self.counts.train_tokens += len(ids)
        self.tokens["train"].append(ids)
        self.ends["train"].append(self.counts.train_tokens)

    def add_heldout(self, ids: np.ndarray, num_bytes: int) -> None:
        """Append the tokens of a held-out document whose text has `num_bytes` UTF-8 bytes."""
        self.counts.heldout_documents += 1
        self.counts.heldout_tokens += len(ids)
        self.counts.heldout_bytes += num_bytes
        self.tokens["heldout"].append(ids)
        self.ends["heldout"].append(self.counts.heldout_tokens)

    def pad(self, split: SplitName, ids: np.ndarray) -> None:
        """Append ids that belong to no document of their own; they are added to the split's last
        document.
        """
        if split == "train":
            self.counts.train_tokens += len(ids)
        else:
            self.counts.heldout_tokens += len(ids)
        self.tokens[split].append(ids)
        if self.ends[split]:
            self.ends[split][-1] += len(ids)


def publish_shard(folder: Path, number: int, shard: ShardBuilder) -> None:
    """Write the shard to disk, then rename it into place. Only one process may call it at a time.
    Raises OSError.
    """
    beside = folder / ".unfinished"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for split in SPLITS:
        write_synced(beside / f"{split}.bin", *(ids.data for ids in shard.tokens[split]))
        write_synced(beside / f"{split}.ends", shard.ends[split].tobytes())
    write_synced(beside / COUNTS, json.dumps(asdict(shard.counts), indent=1).encode())
    beside.rename(shard_folder(folder, number))


def finished_shards(folder: Path) -> list[ShardCounts]:
    """Return the totals of each finished shard, in order. Raises InputError if a shard is
    damaged.
    """
    shards = []
    while (shard := shard_folder(folder, len(shards))).exists():
        try:
            counts = ShardCounts(**json.loads((shard / COUNTS).read_bytes()))
            if not all(isinstance(value, int) and value >= 0 for value in asdict(counts).values()):
                raise ValueError(f"invalid counts: {counts}")
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{shard / COUNTS} is damaged ({error}); delete {folder}") from None
        shards.append(counts)
    return shards


def open_split(folder: Path, split: SplitName, dtype: str, num_tokens: int) -> ShardedTokens:
    """Map the first num_tokens tokens of one split into memory. Raises InputError if a file has the
    wrong size.
    """
    pieces = []
    ends = []
    left = num_tokens
    for number, counts in enumerate(finished_shards(folder)):
        shard = shard_folder(folder, number)
        sizes = asdict(counts)
        tokens = _map(shard / f"{split}.bin", dtype, sizes[f"{split}_tokens"])
        pieces.append(tokens[:left])
        ends.append(_map(shard / f"{split}.ends", "int64", sizes[f"{split}_documents"]))
        left -= len(pieces[-1])
    if left:
        raise InputError(
            f"{folder}: only {num_tokens - left} of {num_tokens} {split} tokens exist; delete this "
            "folder"
        )
    return ShardedTokens(pieces, ends)


def shard_folder(folder: Path, number: int) -> Path:
    return folder / f"{number:05}"


def _map(path: Path, dtype: str, length: int) -> np.ndarray:
    needed = length * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.exists() else 0
    if size != needed:
        raise InputError(
            f"{path}: {size} bytes, need {needed}: the file is damaged; delete {path.parents[1]}"
        )
    # An empty file cannot be mapped.
    return (
        np.memmap(path, dtype=dtype, mode="r", shape=(length,))
        if length
        else np.empty(0, dtype=dtype)
    )
