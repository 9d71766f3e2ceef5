"""Base class of messages between islands, the types of their common fields, and both ends of a call."""

import logging
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outer.errors import InputError, MessageError, TransportError
from outer.network.endpoints import ISLAND_NAME, RUN_NAME, Endpoint, Handler, Kind, Messenger
from outer.network.rejections import RefusedError, Rejections

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 27
"""Limit for a reply, unless its caller knows how long it can be. A part of a model's state must fit."""
LONG_BYTES, MAX_INFLATED_BYTES = 1 << 12, 1 << 24
"""Lengths between which the agreement's messages are compressed: plans of many islands repeat themselves."""
ZLIB = b"\x78"
"""First byte of what zlib has compressed."""
MAX_RANKS = 4096
MAX_ROUND = 1 << 30
MAX_TOKENS = 1 << 62

IslandName = Annotated[str, Field(pattern=f"^{ISLAND_NAME}$")]
RunName = Annotated[str, Field(pattern=f"^{RUN_NAME}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
"""A hash in hexadecimal digits."""


class Message(BaseModel):
    """Base of everything that comes from a peer. Types are checked strictly and unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def encode(self) -> bytes:
        """The message as JSON, the inverse of `parse`."""
        return self.model_dump_json().encode()


M = TypeVar("M", bound=Message)
T = TypeVar("T")


def parse(model: type[M], body: str | bytes) -> M:
    """Parse a message from a peer. Raises MessageError, which names the first field that is wrong."""
    return do_shared((model, body), lambda: _parse(model, body))


def _parse(model: type[M], body: str | bytes) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise MessageError(f"not a {model.__name__}: {where}: {first['msg'][:200]}") from None


@lru_cache(maxsize=8)  # A coordinator sends the same plan to every island.
def deflate(body: bytes) -> bytes:
    """The bytes of a message, compressed (zlib) if they are long."""
    return zlib.compress(body, 1) if LONG_BYTES < len(body) <= MAX_INFLATED_BYTES else body


def inflate(body: bytes) -> bytes:
    """The inverse of `deflate`. Raises MessageError if the result would be too long, or something is missing."""
    if body[:1] != ZLIB:
        return body  # JSON begins with a brace.
    stream = zlib.decompressobj()
    try:
        inflated = stream.decompress(body, MAX_INFLATED_BYTES)
    except zlib.error as error:
        raise MessageError(f"a compressed message that cannot be read: {error}") from None
    if not stream.eof or stream.unused_data:
        raise MessageError(f"a compressed message that is cut off, or has more than {MAX_INFLATED_BYTES} bytes")
    return inflated


async def call_message(
    messenger: Messenger, address: str, kind: str, message: Message | None, reply: type[M], *, timeout_seconds: float
) -> M:
    """Send `message` (None: an empty body) and parse the reply. Raises as `Messenger.call` and `parse` do."""
    body = b"" if message is None else message.encode()
    return parse(reply, await messenger.call(address, kind, body, timeout_seconds=timeout_seconds))


async def answer(
    handler: Handler | None, source: Endpoint, kind: str, body: bytes, rejections: Rejections | None = None
) -> tuple[Kind, bytes]:
    """Run the handler. Returns REPLY and its bytes, or REFUSAL and the reason. Counts the caller's errors."""
    rejections = rejections or Rejections()
    if handler is None:
        rejections.add(str(source), "unknown", f"nothing here answers {kind!r}")
        return Kind.REFUSAL, f"nothing here answers {kind!r}".encode()
    try:
        reply = await handler(source, body)
    except (TransportError, InputError) as error:
        if isinstance(error, MessageError):
            reason = error.kind if isinstance(error, RefusedError) else "call"
            rejections.add(str(source), reason, f"{kind}: {error}")
        return Kind.REFUSAL, str(error).encode()
    except Exception:  # the caller must get an answer even if the handler is broken
        log.exception("the handler of %r failed", kind)
        return Kind.REFUSAL, f"the handler of {kind!r} failed".encode()
    if len(reply) > MAX_REPLY_BYTES:
        return Kind.REFUSAL, f"the reply to {kind!r} is {len(reply)} bytes, at most {MAX_REPLY_BYTES}".encode()
    return Kind.REPLY, reply


def check_carriers(packed: Sequence[tuple[int, int]], num_parts: int, num_ranks: int) -> None:
    """Raise MessageError unless `packed` gives each of the parts a carrier among the ranks."""
    counts = [count for _, count in packed]
    if sum(counts) != num_parts or min(counts, default=1) < 1 or not all(0 <= r < num_ranks for r, _ in packed):
        raise MessageError(f"the carriers given do not cover {num_parts} parts with {num_ranks} ranks")


def pack_carriers(carriers: Sequence[int]) -> list[tuple[int, int]]:
    """Run-length code the carrier rank of each part.

    >>> pack_carriers([0, 0, 0, 1, 1])
    [(0, 3), (1, 2)]
    """
    return [(rank, len(list(run))) for rank, run in groupby(carriers)]


def unpack_carriers(packed: Sequence[tuple[int, int]]) -> Sequence[int]:
    """The carrier rank of each part, the inverse of `pack_carriers`. Most islands have the same, and share them."""
    return _unpack_carriers(tuple(packed))


@lru_cache(maxsize=64)
def _unpack_carriers(packed: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(rank for rank, count in packed for _ in range(count))


Share = Callable[[Hashable, Callable[[], Any]], Any]
"""Given what names a piece of work, and the work: its result, perhaps of an earlier time."""
_shares: list[Share] = []


def do_shared(name: Hashable, work: Callable[[], T]) -> T:
    """The result of the work, which follows from `name` alone and is never changed. Raises what the work raises.

    A simulation of many islands in one process may share such work between them (diloco/virtual/world.py).
    """
    return _shares[-1](name, work) if _shares else work()


@contextmanager
def sharing(share: Share) -> Iterator[None]:
    """Share all such work in this process by `share`."""
    _shares.append(share)
    try:
        yield
    finally:
        _shares.pop()
