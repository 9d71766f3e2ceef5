"""Calls between endpoints over frame streams. Each (caller, callee, lane) has one connection, which
is kept open.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from outer.errors import DeadlineError, MessageError, PeerLost
from outer.identity.tls import TlsIdentity
from outer.network.callers import CALLERS_HOSTS
from outer.network.endpoints import LANES, Endpoint, Handler, Kind, Lane, Traffic
from outer.network.event_loop import Tasks, loop_time
from outer.network.frames import CutOffError, FrameStream, Header, PeerIds, hash_names, unpack_call
from outer.network.handshake import check_access, read_hello, refuse, say_hello
from outer.network.messages import MAX_REPLY_BYTES, answer
from outer.network.outgoing import Outgoing
from outer.network.rejections import SHORT_BYTES, Guest, Guests, MemoryShare, RefusedError
from outer.network.run_key import PeerAuth

log = logging.getLogger(__name__)

MAX_CALL_BYTES = 9 << 20
"""Limit for a call. Any peer that has proved the run key may send one; in a run without a run
key, any peer at all."""
MAX_CONTROL_BYTES = 1 << 24
"""Limit for a reply on the control lane. MAX_REPLY_BYTES is the limit on the bulk lane."""
STALL_SECONDS = 60.0
"""When a caller accepts no bytes of its reply for this time, its connection is closed."""
DIAL_SECONDS = HELLO_SECONDS = 10.0
MAX_OPEN_CALLS = 64
"""Limit per incoming connection, which is not read further while this number of calls is open."""

Dialer = Callable[[str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Function that opens a connection to an address. Raises PeerLost. Its caller limits the time."""


async def _itself(peer: str) -> Collection[str]:
    return (peer,)


class StreamMessenger:
    """A Messenger (outer.network.endpoints) over frame streams, which TCP and libp2p open with
    their `dial`.
    """

    def __init__(
        self,
        run_id: str,
        me: Endpoint,
        dial: Dialer,
        traffic: Traffic,
        auth: PeerAuth | None = None,
    ) -> None:
        self.address = ""  # set by the code that listens for connections
        self.server: asyncio.Server | None = None
        """The server that accepts this messenger's connections, if it listens on TCP."""
        self.auth = auth or PeerAuth()
        self.own_peer_id = ""
        """This side's libp2p peer id, set by the code that opens libp2p streams. If it is set,
        addresses begin with peer ids."""
        self.tls: TlsIdentity | None = None
        """TLS identity that encrypts all connections, if it is set."""
        self.find_key: Callable[[str], str] = lambda address: ""
        """Function that returns the island key in an address, or "". The endpoint that answers
        there must prove it."""
        self.find_hosts: Callable[[str], Awaitable[Collection[str]]] = _itself
        """Function that returns the IP addresses of a connected peer, given its `peer` in
        `accept`."""
        self.on_failure: Callable[[str], None] = lambda address: None
        """Function called with an address whose endpoint did not prove to be the island, or
        broke the connection."""
        self.max_body_bytes = MAX_CALL_BYTES
        """Limit for an incoming call. A longer one ends its connection before it is read."""
        self._run = hash_names(run_id, "control")
        self._me = me
        self._dial = dial
        self.traffic = traffic
        self._handlers: dict[str, Handler] = {}
        self._long_replies: dict[str, int] = {}
        """Size of the longest reply so far, by kind of call. Only replies above SHORT_BYTES are
        counted."""
        self._outgoing: dict[tuple[str, Lane], asyncio.Task[Outgoing]] = {}
        self._incoming: set[FrameStream] = set()
        self._guests = Guests()
        self._tasks = Tasks()
        self._is_closed = False

    def serve(self, kind: str, handler: Handler) -> None:
        self._handlers[kind] = handler

    async def call(
        self,
        address: str,
        kind: str,
        body: bytes,
        *,
        timeout_seconds: float,
        lane: Lane = "control",
        longest: int = 0,
    ) -> bytes:
        if len(body) > MAX_CALL_BYTES:
            raise MessageError(
                f"a call {kind!r} of {len(body)} bytes, at most {MAX_CALL_BYTES} are allowed"
            )
        began = loop_time()
        longest = longest or (MAX_CONTROL_BYTES if lane == "control" else MAX_REPLY_BYTES)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await (await self._connection(address, lane)).call(kind, body, longest)
        except TimeoutError:
            # Otherwise connections over a cut link, or through a router that has forgotten them,
            # are kept until the kernel drops them minutes later. A bulk connection on which bytes
            # have arrived since the call began is kept.
            for each in LANES if lane == "control" else ():
                connection = _opened(self._outgoing.get((address, each)))
                if connection and (each == "control" or connection.stream.heard_at < began):
                    connection.close("it did not answer")
            raise DeadlineError(
                f"{address} did not answer {kind!r} within {timeout_seconds:g} s"
            ) from None

    async def accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str = ""
    ) -> None:
        """Serve one incoming connection until it ends. `peer` names the other side; the default
        is its host.
        """
        stream = self._stream(reader, writer, peer)
        try:
            guest = self._enter(stream)
        except (MessageError, ConnectionError) as error:
            log.debug("dropped a connection: %s", error)
            stream.close()
            return
        self._incoming.add(stream)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                if self.tls is not None:
                    await stream.start_tls(self.tls.server, self.tls.certificate)
                source, _ = await read_hello(stream, self._me, self.auth)
            guest.prove(source.island)
            await self._answer_all(source, stream, guest)
        except MessageError as error:
            await refuse(stream, error, self.auth.rejections)
        except TimeoutError:
            self.auth.rejections.add(
                stream.peer, "silent", "a hello or the body of a call did not arrive in time"
            )
        except CutOffError as error:
            self.auth.rejections.add(stream.peer, "truncated", str(error))
        except ConnectionError as error:
            log.debug("a control connection ended: %s", error)
        finally:
            self._incoming.discard(stream)
            guest.leave()
            stream.close()

    def on_malformed(self, address: str, cause: str) -> None:
        if opened := [
            found for lane in LANES if (found := _opened(self._outgoing.get((address, lane))))
        ]:
            self._blame(opened[0].stream, cause)

    async def close(self) -> None:
        self._is_closed = True
        if self.server is not None:
            self.server.close()
        for task in self._outgoing.values():
            task.cancel()
        self._tasks.cancel()
        for stream in list(self._incoming):
            stream.close()
        for task in self._outgoing.values():
            if connection := _opened(task):
                connection.close("this messenger was closed")
        self._outgoing.clear()

    async def _connection(self, address: str, lane: Lane) -> Outgoing:
        """Return the open connection, or dial one. Calls that are made while it is being dialled
        share it.
        """
        if self._is_closed:
            raise PeerLost(address, "this messenger was closed")
        task = self._outgoing.get((address, lane))
        connection = _opened(task)
        if task is None or (connection.cause is not None if connection else task.done()):
            task = self._outgoing[address, lane] = asyncio.create_task(self._open(address))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # The dial has its own deadline. It continues after a caller gives up, so that later callers
        # can use the connection.
        return await asyncio.shield(task)

    async def _open(self, address: str) -> Outgoing:
        stream = None
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                stream = self._stream(*await self._dial(address), address)
                if self.tls is not None:
                    await stream.start_tls(self.tls.client)
                callee = await say_hello(stream, self._me, self.auth)
                if stream.peer_key != (self.find_key(address) or stream.peer_key):
                    raise RefusedError(
                        "name", f"{callee} answers where the island of another key was expected"
                    )
                return Outgoing(address, callee, stream, self.auth)
        except (MessageError, ConnectionError, TimeoutError) as error:
            if stream is not None:
                stream.close()
                self.on_failure(address)
                if isinstance(error, MessageError):
                    self.auth.rejections.add_error(stream.peer, error)
            raise PeerLost(
                address, str(error) or f"no connection within {DIAL_SECONDS:g} s"
            ) from None

    def _stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> FrameStream:
        peer_ids = PeerIds(self.own_peer_id, peer.partition(":")[0]) if self.own_peer_id else None
        stream = FrameStream(reader, writer, self._run, self.traffic, peer_ids)
        stream.peer = peer or stream.peer
        return stream

    def _enter(self, stream: FrameStream) -> Guest:
        """Count a new connection. Raises MessageError if there are too many, and ConnectionError
        after `close`.
        """
        if self._is_closed:
            raise ConnectionResetError("this messenger was closed")
        try:
            return self._guests.enter(stream.peer, stream.close)
        except MessageError as error:
            self.auth.rejections.add_error(stream.peer, error)
            raise

    async def _answer_all(self, source: Endpoint, stream: FrameStream, guest: Guest) -> None:
        gate = asyncio.Semaphore(MAX_OPEN_CALLS)
        while True:
            await gate.acquire()
            held = guest.next_body()
            try:
                header, payload = await stream.read(self.max_body_bytes, held.hold)
                check_access(
                    stream, self.auth, source
                )  # it may have been banned since the connection opened
                if header.kind is not Kind.CALL:
                    raise RefusedError("header", f"{source} sent {header.kind.name}, CALL expected")
                kind, body = unpack_call(payload.numpy().data)
            except BaseException:
                held.release()
                raise
            share = guest.next_reply()
            CALLERS_HOSTS.set(partial(self.find_hosts, guest.host))  # tasks inherit the value
            task = self._tasks.start(
                self._answer(source, stream, header.request, kind, body, share)
            )
            del payload, body  # free the memory: the next call may come much later
            task.add_done_callback(
                lambda _, held=held, share=share: (gate.release(), held.release(), share.release())
            )

    async def _answer(
        self,
        source: Endpoint,
        stream: FrameStream,
        request: int,
        kind: str,
        body: bytes,
        share: MemoryShare,
    ) -> None:
        try:
            if expected := self._long_replies.get(kind, 0):
                # Memory is counted before the reply is built: a caller that requests replies and
                # does not read them must not fill memory.
                await share.hold(expected)
            if stream.is_closed:
                return
            about = self._handlers.get(kind), source, kind, body
            code, reply = await answer(*about, self.auth.rejections, partial(self._blame, stream))
            if len(reply) > SHORT_BYTES:
                self._long_replies[kind] = max(expected, len(reply))
            share.correct(len(reply) if len(reply) > SHORT_BYTES else 0)
            await stream.write(Header(code, self._me.rank, request=request), reply, STALL_SECONDS)
        except ConnectionError as error:
            log.debug("the caller of %r has disconnected: %s", kind, error)
        except TimeoutError:
            self.auth.rejections.add(
                stream.peer, "unread", f"replies to {kind!r} were requested and not read"
            )
            stream.close()

    def _blame(self, stream: FrameStream, cause: str) -> None:
        if self.auth.blame(stream.peer, stream.peer_key, cause):
            stream.close()


def _opened(task: asyncio.Task[Outgoing] | None) -> Outgoing | None:
    """Return the connection that a task has opened, or None while it is dialling and if it
    failed.
    """
    if task is None or not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()
