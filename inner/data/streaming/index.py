"""The index of a text in shards: the contents of each shard, and where in the text it begins.

    index.json      this index, replaced whole when a shard is added
    heldout.bin     ids of the held-out text
    00000.bin       ids of the first shard and the first id of the next; uint16, uint32, or int32
                    for conversations
    00001.bin ...

The files lie in the folder of a cache, or in a store that other people can write to. The index is
therefore checked when it is read.
"""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inner.data.chat.coding import CONTEXT, DTYPE
from inner.errors import InputError, summarise

FORMAT = 1
INDEX = "index.json"
HELDOUT = "heldout.bin"
MAX_TOKENS = 1 << 32
"""Largest number of tokens in a file."""
MAX_INDEX_BYTES = 1 << 30
SHA256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=1 << 60)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Begin(_Part):
    """Where in the text a shard begins."""

    document: Count = 0
    """Number of the document that contains the shard's first token, as the source counts
    documents."""
    token: Count = 0
    """Number of that token within the document."""
    place: list[int] | None = Field(default=None, max_length=16)
    """The place from which the source can continue with the document; None if it must be read from
    the beginning."""


class Shard(_Part):
    """One finished shard."""

    tokens: int = Field(ge=0, le=MAX_TOKENS)
    """Number of ids in the shard's file: shard_tokens + 1, or fewer at the end of the text."""
    sha256: SHA256
    begin: Begin


class Heldout(_Part):
    """The held-out text."""

    tokens: int = Field(ge=0, le=MAX_TOKENS)
    text_bytes: Count
    """Number of UTF-8 bytes that the ids encode."""
    sha256: SHA256
    is_end: bool = False
    """Whether the text is the end of a document whose beginning is trained on."""


class Made(_Part):
    """The entries that a shard which has just been made will have in the index."""

    record: Shard
    following: Begin
    """Where the next shard begins."""
    heldout: Heldout


class ShardIndex(_Part):
    """The index of all finished shards of a text."""

    format: Literal[1] = FORMAT
    identity: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Identity of the text: of its source, the tokenizer and the shards."""
    dtype: Literal["uint16", "uint32", "int32"]
    vocab_size: int = Field(ge=1, le=1 << 31)
    eos_id: Count
    shard_tokens: int = Field(ge=1, lt=MAX_TOKENS)
    heldout: Heldout | None = None
    """None while there is no shard."""
    shards: tuple[Shard, ...] = ()
    following: Begin = Begin()
    """Where the next shard begins."""
    is_complete: bool = False
    """Whether the text ends with these shards."""

    @model_validator(mode="after")
    def _all_but_the_last_are_full(self) -> "ShardIndex":
        full = self.shard_tokens + 1
        sizes = [shard.tokens for shard in self.shards]
        if any(size != full for size in sizes[:-1]) or (sizes and not 2 <= sizes[-1] <= full):
            raise ValueError(f"a shard does not have {full} tokens and is not the last")
        if sizes and sizes[-1] != full and not self.is_complete:
            raise ValueError("the last shard is not full, but the text does not end with it")
        if bool(sizes) != (self.heldout is not None):
            raise ValueError(
                "it has shards without a held-out text, or a held-out text without shards"
            )
        return self

    @property
    def is_coded(self) -> bool:
        """Whether the ids come from conversations (inner/data/chat/coding.py)."""
        return self.dtype == DTYPE

    @property
    def item_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def train_tokens(self) -> int:
        """Number of training tokens in all shards."""
        return (
            max(self.shard_tokens * (len(self.shards) - 1) + self.shards[-1].tokens, 0)
            if self.shards
            else 0
        )

    def count_sequences(self, seq_len: int) -> int:
        """Return the number of sequences in all shards."""
        return (self.train_tokens - 1) // seq_len if self.shards else 0

    def with_shard(self, made: Made) -> "ShardIndex":
        """Return this index with one more shard. A shard that is not full ends the text."""
        shards = (*self.shards, made.record)
        change = {"shards": shards, "following": made.following, "heldout": made.heldout}
        return self.model_copy(
            update=change | {"is_complete": made.record.tokens <= self.shard_tokens}
        )

    def extends(self, other: "ShardIndex") -> bool:
        """Return whether this index equals `other` or has more shards than `other`."""
        return (
            self.identity == other.identity
            and self.shards[: len(other.shards)] == other.shards
            and (self.heldout == other.heldout or not other.shards)
            and (self == other or not other.is_complete)
        )


def parse_index(data: bytes, where: str) -> ShardIndex:
    """Check and return an index. Raises InputError; `where` is the name of the index in its
    message.
    """
    try:
        return ShardIndex.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{where}: is not the index of a prepared text ({place}: {first['msg']}); write it "
            "again with `diloco prepare`"
        ) from None
    except RecursionError as error:
        raise InputError(
            f"{where}: is not the index of a prepared text ({summarise(error)})"
        ) from None


def check_ids(ids: np.ndarray, index: ShardIndex, where: Path) -> None:
    """Raise InputError if an id does not belong to the tokenizer. Other people may have written the
    file.
    """
    size = index.vocab_size
    if len(ids) and not (CONTEXT - size < int(ids.min()) and int(ids.max()) < size):
        raise InputError(
            f"{where}: holds the ids {ids.min()} to {ids.max()}, but the tokenizer has 0 to "
            f"{size - 1}; prepare the text again, in another place"
        )


def shard_name(number: int) -> str:
    return f"{number:05}.bin"


def is_shard_name(name: str) -> bool:
    return re.fullmatch(r"\d{5,}\.bin", name) is not None


def sha256_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
