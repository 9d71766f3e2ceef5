"""The index of a text in shards: what each shard holds, and where in the text it begins.

    index.json      this index, replaced whole when a shard is added
    heldout.bin     ids of the held-out text
    00000.bin       ids of the first shard and the first id of the next; uint16, uint32, or int32 for conversations
    00001.bin ...

The files may lie in a folder of a cache, or in a store of which others have the keys: an index is checked when it is
read.
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
"""Of one file."""
MAX_INDEX_BYTES = 1 << 30
SHA256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=1 << 60)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Begin(_Part):
    """Where a shard begins in the text."""

    document: Count = 0
    """Number of the document with its first token, as the source counts documents."""
    token: Count = 0
    """Number of the token in that document."""
    place: list[int] | None = Field(default=None, max_length=16)
    """From where the source can go on with that document; None if it must be read from its beginning."""


class Shard(_Part):
    """One finished shard."""

    tokens: int = Field(ge=0, le=MAX_TOKENS)
    """Ids in its file: shard_tokens + 1, or fewer at the end of the text."""
    sha256: SHA256
    begin: Begin


class Heldout(_Part):
    """The held-out text."""

    tokens: int = Field(ge=0, le=MAX_TOKENS)
    text_bytes: Count
    """UTF-8 bytes that they encode."""
    sha256: SHA256
    is_end: bool = False
    """Whether it is the end of a document of which the beginning is trained on."""


class Made(_Part):
    """What the index will say of a shard that has just been made."""

    record: Shard
    following: Begin
    """Where the next one begins."""
    heldout: Heldout


class Index(_Part):
    """All shards that are finished."""

    format: Literal[1] = FORMAT
    identity: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Of the text: of its source, the tokenizer and the shards."""
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
    def _all_but_the_last_are_full(self) -> "Index":
        full = self.shard_tokens + 1
        sizes = [shard.tokens for shard in self.shards]
        if any(size != full for size in sizes[:-1]) or (sizes and not 2 <= sizes[-1] <= full):
            raise ValueError(f"a shard has other than {full} tokens and is not the last")
        if sizes and sizes[-1] != full and not self.is_complete:
            raise ValueError("the last shard is not full, and the text goes on")
        if bool(sizes) != (self.heldout is not None):
            raise ValueError("it has shards without a held-out text, or one without shards")
        return self

    @property
    def is_coded(self) -> bool:
        """Whether the ids are those of conversations (inner/data/chat/coding.py)."""
        return self.dtype == DTYPE

    @property
    def item_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def train_tokens(self) -> int:
        """Training tokens of all shards."""
        return max(self.shard_tokens * (len(self.shards) - 1) + self.shards[-1].tokens, 0) if self.shards else 0

    def count_sequences(self, seq_len: int) -> int:
        """Sequences in all shards."""
        return (self.train_tokens - 1) // seq_len if self.shards else 0

    def with_shard(self, made: Made) -> "Index":
        """This index with one more shard. One that is not full ends the text."""
        shards = (*self.shards, made.record)
        change = {"shards": shards, "following": made.following, "heldout": made.heldout}
        return self.model_copy(update=change | {"is_complete": made.record.tokens <= self.shard_tokens})

    def extends(self, other: "Index") -> bool:
        """Whether this is the index `other`, perhaps with more shards."""
        return (
            self.identity == other.identity
            and self.shards[: len(other.shards)] == other.shards
            and (self.heldout == other.heldout or not other.shards)
            and (self == other or not other.is_complete)
        )


def parse_index(data: bytes, where: str) -> Index:
    """Check and return an index. Raises InputError, which names it by `where`."""
    try:
        return Index.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{where}: is not the index of a prepared text ({place}: {first['msg']}); write it again with "
            "`diloco prepare`"
        ) from None
    except RecursionError as error:
        raise InputError(f"{where}: is not the index of a prepared text ({summarise(error)})") from None


def check_ids(ids: np.ndarray, index: Index, where: Path) -> None:
    """Raise InputError if one of the ids is not of the tokenizer: whoever wrote them may have written anything."""
    size = index.vocab_size
    if len(ids) and not (CONTEXT - size < int(ids.min()) and int(ids.max()) < size):
        raise InputError(
            f"{where}: holds the ids {ids.min()} to {ids.max()}, and the tokenizer has 0 to {size - 1}; prepare "
            "the text again, at another place"
        )


def shard_name(number: int) -> str:
    return f"{number:05}.bin"


def is_shard_name(name: str) -> bool:
    return re.fullmatch(r"\d{5,}\.bin", name) is not None


def sha256_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
