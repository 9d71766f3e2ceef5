"""Base class of messages between islands, the types of their common fields, and both ends of a
call.
"""

import asyncio
import gc
import logging
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationError,
)
from pydantic_core import CoreSchema

from outer.errors import InputError, MessageError, TransportError
from outer.limits import MAX_BYTES, excess, fail_fast, limit_of
from outer.network.endpoints import ISLAND_NAME, RUN_NAME, Endpoint, Handler, Kind, Messenger
from outer.network.rejections import MalformedError, RefusedError, Rejections
from outer.threads import PARSING

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 27
"""Limit for a reply if its caller gives no other. A part of a model's state must fit."""
LONG_BYTES = 1 << 12
"""Longer messages of the agreement are compressed, because plans of many islands contain many
repetitions."""
MAX_REFUSAL_BYTES = 1 << 14
LARGE_BYTES = 1 << 16
"""Longer messages are parsed off the event loop, one at a time."""
ZLIB = b"\x78"
"""First byte of data that zlib has compressed."""
MAX_RANKS = 4096
MAX_ROUND = 1 << 30
MAX_TOKENS = 1 << 62
MAX_PARTS = 1 << 20
MAX_STEP_SECONDS = 1e6

RankNumber = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
PartNumber = Annotated[int, Field(ge=0, lt=MAX_PARTS)]
PartCount = Annotated[int, Field(ge=1, le=MAX_PARTS)]
IslandName = Annotated[str, Field(max_length=64, pattern=f"^{ISLAND_NAME}$")]
RunName = Annotated[str, Field(max_length=64, pattern=f"^{RUN_NAME}$")]
Digest = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]{16,64}$")]
"""A hash in hexadecimal digits."""
Incarnation = Annotated[str, Field(max_length=32, pattern=r"^[0-9a-f]{8,32}$")]
"""Identifies one process of an island."""
Address = Annotated[str, Field(max_length=4096)]
"""Address at which a rank is reached."""
Carriers = Annotated[list[tuple[RankNumber, PartCount]], Field(max_length=1 << 14)]
"""Carrier rank of each part, run-length coded as (rank, number of parts)."""
StepSeconds = Annotated[float, Field(ge=0, le=MAX_STEP_SECONDS, allow_inf_nan=False)]
"""Median duration of an inner step in seconds; 0 if it has not been measured."""


class UnknownFieldError(TypeError):
    """A message has an unknown field. Raised at once, while pydantic would first collect all
    errors of values.
    """


def _refuse_field(name: object) -> None:
    raise UnknownFieldError(f"unknown field {str(name)[:64]!r}")


class Message(BaseModel):
    """Base class of everything that comes from a peer. Types are checked strictly and unknown
    fields are rejected.

    Parsing stops at the first error, even if a message has a million wrong items.
    """

    is_parsed_aside: ClassVar[bool] = False
    """Whether the message is costly to check even if it is short, and so is never parsed on the
    event loop."""
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)
    __pydantic_extra__: dict[Annotated[str, PlainValidator(_refuse_field)], Any] = Field(init=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return fail_fast(handler(source))

    def encode(self) -> bytes:
        """Return the message as JSON, the inverse of `parse`. Raises MessageError if it is
        longer than its kind may be.
        """
        body = self.model_dump_json().encode()
        if len(body) > LONG_BYTES and (text := excess(type(self), body)):
            raise MessageError(f"{text}: {TOO_LONG_CURE}")
        return body


TOO_LONG_CURE = "use fewer ranks per island, fewer islands, or a larger outer.part_elements"


M = TypeVar("M", bound=Message)
T = TypeVar("T")


def parse(model: type[M], body: str | bytes) -> M:
    """Parse a message from a peer. Raises MalformedError, which names the first wrong field.

    A message that is longer than its kind can be is not parsed at all (outer/limits.py).
    """
    return do_shared((model, body), lambda: _parse(model, body))


def _parse(model: type[M], body: str | bytes) -> M:
    if text := excess(model, body.encode(errors="replace") if isinstance(body, str) else body):
        raise MalformedError(text)
    try:
        return model.model_validate_json(body)
    except UnknownFieldError as error:
        raise MalformedError(f"not a {model.__name__}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise MalformedError(f"not a {model.__name__}: {where}: {first['msg'][:200]}") from None


async def receive(model: type[M], body: bytes) -> M:
    """Decompress and parse a peer's message; a large one off the event loop. Raises
    MalformedError.
    """
    if model.is_parsed_aside or len(body) > LARGE_BYTES or is_inflated_large(body):
        return await asyncio.get_running_loop().run_in_executor(
            PARSING.executor, _inflate_and_parse, model, body
        )
    return _inflate_and_parse(model, body)


def _inflate_and_parse(model: type[M], body: bytes) -> M:
    with _without_collections():
        return parse(model, inflate(body, limit_of(model).num_bytes))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Suspend garbage collection, which a message with many items would otherwise trigger for
    the whole process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_inflated_large(body: bytes) -> bool:
    """Return whether compressed bytes expand to more than LARGE_BYTES."""
    if body[:1] != ZLIB:
        return False
    stream = zlib.decompressobj()
    try:
        stream.decompress(body, LARGE_BYTES)
    except zlib.error:
        return False
    return not stream.eof


@lru_cache(maxsize=8)  # A coordinator sends the same plan to every island.
def deflate(body: bytes) -> bytes:
    """Return the bytes of a message, compressed with zlib if they are long."""
    return zlib.compress(body, 1) if len(body) > LONG_BYTES else body


def inflate(body: bytes, most: int = MAX_BYTES) -> bytes:
    """Return the bytes before `deflate`, at most `most`. Raises MalformedError if there are
    more, or if bytes are missing.
    """
    if body[:1] != ZLIB:
        return body  # JSON begins with a brace.
    stream = zlib.decompressobj()
    try:
        inflated = stream.decompress(body, most)
    except zlib.error as error:
        raise MalformedError(f"a compressed message cannot be read: {error}") from None
    if not stream.eof or stream.unused_data:
        raise MalformedError(f"a compressed message is cut off, or has more than {most} bytes")
    return inflated


async def call_message(
    messenger: Messenger,
    address: str,
    kind: str,
    message: Message | None,
    reply: type[M],
    *,
    timeout_seconds: float,
) -> M:
    """Send `message` (None: an empty body) and parse the reply. Raises like `Messenger.call` and
    `parse`.
    """
    body = b"" if message is None else message.encode()
    answered = await messenger.call(
        address, kind, body, timeout_seconds=timeout_seconds, longest=longest_reply(reply)
    )
    return await receive_reply(messenger, address, reply, answered)


def longest_reply(reply: type[Message]) -> int:
    """Return the number of bytes that a caller reads of a reply, or of the refusal in its place."""
    return max(limit_of(reply).num_bytes, MAX_REFUSAL_BYTES)


async def receive_reply(messenger: Messenger, address: str, reply: type[M], body: bytes) -> M:
    """Parse a reply of the endpoint at this address, and count it if it is malformed. Raises
    MalformedError.
    """
    try:
        return await receive(reply, body)
    except MalformedError as error:
        messenger.on_malformed(address, str(error))
        raise


async def answer(
    handler: Handler | None,
    source: Endpoint,
    kind: str,
    body: bytes,
    rejections: Rejections | None = None,
    on_malformed: Callable[[str], None] = lambda cause: None,
) -> tuple[Kind, bytes]:
    """Run the handler and count the caller's errors. Return REPLY and the reply's bytes, or
    REFUSAL and the reason.
    """
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
        if isinstance(error, MalformedError):
            on_malformed(str(error))
        return Kind.REFUSAL, str(error).encode()
    except Exception:  # the caller must get a reply even if the handler is broken
        log.exception("the handler of %r failed", kind)
        return Kind.REFUSAL, f"the handler of {kind!r} failed".encode()
    if len(reply) > MAX_REPLY_BYTES:
        return (
            Kind.REFUSAL,
            f"the reply to {kind!r} is {len(reply)} bytes, at most {MAX_REPLY_BYTES} are "
            "allowed".encode(),
        )
    return Kind.REPLY, reply


def check_carriers(packed: Sequence[tuple[int, int]], num_parts: int, num_ranks: int) -> None:
    """Raise MessageError unless `packed` assigns each part a carrier among the ranks."""
    counts = [count for _, count in packed]
    if (
        sum(counts) != num_parts
        or min(counts, default=1) < 1
        or not all(0 <= r < num_ranks for r, _ in packed)
    ):
        raise MessageError(
            f"the carriers given do not cover {num_parts} parts with {num_ranks} ranks"
        )


def pack_carriers(carriers: Sequence[int]) -> list[tuple[int, int]]:
    """Run-length encode the carrier rank of each part.

    >>> pack_carriers([0, 0, 0, 1, 1])
    [(0, 3), (1, 2)]
    """
    return [(rank, len(list(run))) for rank, run in groupby(carriers)]


def unpack_carriers(packed: Sequence[tuple[int, int]]) -> Sequence[int]:
    """Return the carrier rank of each part, the inverse of `pack_carriers`. Islands with equal
    carriers share one object.
    """
    return _unpack_carriers(tuple(packed))


@lru_cache(maxsize=64)
def _unpack_carriers(packed: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(rank for rank, count in packed for _ in range(count))


Share = Callable[[Hashable, Callable[[], Any]], Any]
"""Function of a name for a piece of work and the work itself. It returns the work's result,
perhaps from an earlier call."""
_shares: list[Share] = []


def do_shared(name: Hashable, work: Callable[[], T]) -> T:
    """Return the result of the work, which is determined by `name` alone and is never changed.
    Raises what the work raises.

    A simulation of many islands in one process may share such work between them
    (diloco/virtual/world.py).
    """
    return _shares[-1](name, work) if _shares else work()


@contextmanager
def sharing(share: Share) -> Iterator[None]:
    """Share all work of `do_shared` in this process through `share` within the block."""
    _shares.append(share)
    try:
        yield
    finally:
        _shares.pop()
