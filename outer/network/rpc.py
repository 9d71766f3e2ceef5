"""Calls between endpoints over frame streams: one connection for each (caller, callee, lane), kept open.

How a connection is opened is the network's business: TCP and libp2p hand in a `dial`.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

from outer.errors import DeadlineError, InputError, MessageError, PeerLost, TransportError
from outer.keys import Trust
from outer.membership.base import Handler, Lane
from outer.refusals import Refusals, RefusedError
from outer.transports.base import Endpoint, Traffic
from outer.wire import CutOffError, FrameStream, Header, Kind, hash_of, refused_by_peer, text_of, view_of

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 27
"""Of a call or reply; a part of a model's state must fit in."""
DIAL_SECONDS = 10.0
HELLO_SECONDS = 10.0
MAX_INCOMING = 4096
MAX_OPEN_CALLS = 64
"""Per incoming connection; beyond it the connection is not read on."""

Dial = Callable[[str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Opens a connection to an address. Raises PeerLost."""


class StreamMessenger:
    """See outer.membership.base.Messenger. `address` is set by whoever listens, before anybody is told of it."""

    def __init__(
        self,
        run_id: str,
        me: Endpoint,
        dial: Dial,
        traffic: Traffic,
        trust: Trust | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.address = ""
        self.trust = trust or Trust()
        self._max_body_bytes = max_body_bytes
        self._run, self._me, self._dial, self._traffic = hash_of(run_id, "control"), me, dial, traffic
        self._handlers: dict[str, Handler] = {}
        self._outgoing: dict[tuple[str, Lane], asyncio.Task[_Outgoing]] = {}
        self._incoming: set[FrameStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def serve(self, kind: str, handler: Handler) -> None:
        self._handlers[kind] = handler

    async def call(
        self, address: str, kind: str, body: bytes, *, timeout_seconds: float, lane: Lane = "control"
    ) -> bytes:
        if len(body) > MAX_BODY_BYTES:
            raise MessageError(f"a call {kind!r} of {len(body)} bytes, at most {MAX_BODY_BYTES} are allowed")
        try:
            async with asyncio.timeout(timeout_seconds):
                outgoing = await self._connection(address, lane)
                return await outgoing.call(kind, body)
        except TimeoutError:
            if lane == "control":
                # Else a connection through a cut cable is kept until the kernel gives it up, minutes after the cure.
                self._drop(address, lane)
            raise DeadlineError(f"{address} did not answer {kind!r} within {timeout_seconds:g} s") from None

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str = "") -> None:
        """Serve one incoming connection until it ends. `peer` names the other side better than its host does."""
        stream = self._stream(reader, writer, peer)
        if self._is_closed or len(self._incoming) >= MAX_INCOMING:
            if not self._is_closed:
                self.trust.refusals.add(stream.peer, "streams", f"more than {MAX_INCOMING} connections")
            stream.close()
            return
        self._incoming.add(stream)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                source, _ = await stream.read_hello(self._me)
            await self._answer_all(source, stream)
        except MessageError as error:
            await stream.refuse(error, self.trust.refusals)
        except TimeoutError:
            self.trust.refusals.add(stream.peer, "silent", f"no hello within {HELLO_SECONDS:g} s")
        except CutOffError as error:
            self.trust.refusals.add(stream.peer, "truncated", str(error))
        except ConnectionError as error:
            log.debug("a control connection ended: %s", error)
        finally:
            self._incoming.discard(stream)
            stream.close()

    async def close(self) -> None:
        self._is_closed = True
        outgoing = list(self._outgoing.values())
        for task in [*outgoing, *self._tasks]:
            task.cancel()
        for stream in list(self._incoming):
            stream.close()
        for task in outgoing:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close("this messenger was closed")
        self._outgoing.clear()

    def _drop(self, address: str, lane: Lane) -> None:
        """Close an open connection; the next call dials anew."""
        task = self._outgoing.get((address, lane))
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            task.result().close("it did not answer")

    async def _connection(self, address: str, lane: Lane) -> "_Outgoing":
        """The kept connection, or a new one. Callers that come while it is dialled wait for the same."""
        if self._is_closed:
            raise PeerLost(address, "this messenger was closed")
        task = self._outgoing.get((address, lane))
        if task is None or _is_useless(task):
            task = self._outgoing[address, lane] = asyncio.create_task(self._open(address))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A caller that gives up leaves the dial to those that come after; it has its own deadline.
        return await asyncio.shield(task)

    async def _open(self, address: str) -> "_Outgoing":
        stream = None
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                stream = self._stream(*await self._dial(address), address)
                await stream.say_hello(self._me)
                return _Outgoing(address, stream, self.trust.refusals)
        except (MessageError, ConnectionError, TimeoutError) as error:
            if stream is not None:
                stream.close()
                if isinstance(error, MessageError):
                    self.trust.refusals.add_error(stream.peer, error)
            raise PeerLost(address, str(error) or f"no connection within {DIAL_SECONDS:g} s") from None

    def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> FrameStream:
        stream = FrameStream(reader, writer, self._run, self._traffic, self.trust.key)
        stream.peer = peer or stream.peer
        return stream

    async def _answer_all(self, source: Endpoint, stream: FrameStream) -> None:
        gate = asyncio.Semaphore(MAX_OPEN_CALLS)
        while True:
            await gate.acquire()
            header, payload = await stream.read(self._max_body_bytes)
            if header.kind is not Kind.CALL:
                raise RefusedError("header", f"{source} sent {header.kind.name}, CALL expected")
            kind, body = unpack_call(bytes(view_of(payload)))
            task = asyncio.create_task(self._answer(source, stream, header.request, kind, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: gate.release())

    async def _answer(self, source: Endpoint, stream: FrameStream, request: int, kind: str, body: bytes) -> None:
        code, reply = await answer(self._handlers.get(kind), source, kind, body, self.trust.refusals)
        try:
            await stream.write(Header(code, self._me.rank, request=request, num_bytes=len(reply)), reply)
        except ConnectionError as error:
            log.debug("the caller of %r has gone: %s", kind, error)


async def answer(
    handler: Handler | None, source: Endpoint, kind: str, body: bytes, refusals: Refusals | None = None
) -> tuple[Kind, bytes]:
    """REPLY and the handler's bytes, or REFUSAL and why. What is the caller's fault is counted in `refusals`."""
    refusals = refusals or Refusals()
    if handler is None:
        refusals.add(str(source), "unknown", f"nothing here answers {kind!r}")
        return Kind.REFUSAL, f"nothing here answers {kind!r}".encode()
    try:
        reply = await handler(source, body)
    except MessageError as error:
        refusals.add(str(source), "call", f"{kind}: {error}")
        return Kind.REFUSAL, str(error).encode()
    except (TransportError, InputError) as error:
        return Kind.REFUSAL, str(error).encode()
    except Exception:  # a broken handler must not silence the caller
        log.exception("the handler of %r failed", kind)
        return Kind.REFUSAL, f"the handler of {kind!r} failed".encode()
    if len(reply) > MAX_BODY_BYTES:
        return Kind.REFUSAL, f"the reply to {kind!r} is {len(reply)} bytes, at most {MAX_BODY_BYTES}".encode()
    return Kind.REPLY, reply


class _Outgoing:
    """A connection to a callee, with the calls that wait for their replies."""

    def __init__(self, address: str, stream: FrameStream, refusals: Refusals) -> None:
        self._address, self._stream, self._refusals = address, stream, refusals
        self._requests = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._cause: str | None = None
        self._reading = asyncio.create_task(self._read_replies())

    @property
    def is_broken(self) -> bool:
        return self._cause is not None

    async def call(self, kind: str, body: bytes) -> bytes:
        if self._cause is not None:
            raise PeerLost(self._address, self._cause)
        request = next(self._requests)
        future = self._waiting[request] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to ask
        message = _pack_call(kind, body)
        writing = asyncio.create_task(
            self._stream.write(Header(Kind.CALL, request=request, num_bytes=len(message)), message)
        )
        try:
            await asyncio.shield(writing)  # a caller that gives up must not leave half a frame
            return await future
        except ConnectionError as error:
            self.close(str(error))
            raise PeerLost(self._address, str(error)) from None
        finally:
            self._waiting.pop(request, None)
            writing.add_done_callback(lambda task: task.cancelled() or task.exception())

    def close(self, cause: str) -> None:
        """Fail every waiting call. Idempotent."""
        self._cause = self._cause or cause
        self._reading.cancel()
        self._stream.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(self._address, self._cause))

    async def _read_replies(self) -> None:
        try:
            while True:
                header, payload = await self._stream.read(MAX_BODY_BYTES)
                if header.kind is Kind.REFUSAL and header.request == 0:
                    raise refused_by_peer(payload)
                future = self._waiting.get(header.request)
                if future is None or future.done():
                    continue
                if header.kind is Kind.REPLY:
                    future.set_result(bytes(view_of(payload)))
                else:
                    future.set_exception(MessageError(text_of(payload)[:2000]))
        except MessageError as error:
            self._refusals.add_error(self._stream.peer, error)
            self.close(str(error))
        except ConnectionError as error:
            self.close(str(error))


def _is_useless(task: "asyncio.Task[_Outgoing]") -> bool:
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None or task.result().is_broken


def _pack_call(kind: str, body: bytes) -> bytes:
    name = kind.encode()
    return bytes([len(name)]) + name + body


def unpack_call(message: bytes) -> tuple[str, bytes]:
    """The kind and body of a call. Raises MessageError when it is malformed."""
    if not message or len(message) < 1 + message[0]:
        raise RefusedError("header", "a call without its kind")
    try:
        return message[1 : 1 + message[0]].decode(), message[1 + message[0] :]
    except UnicodeDecodeError:
        raise RefusedError("header", "a call whose kind is not UTF-8") from None
