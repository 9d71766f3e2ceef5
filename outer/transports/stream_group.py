"""The streams of one epoch: whose they are, what has arrived on them, and who is lost."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from outer.errors import MessageError, PeerLost, TransportError
from outer.network.endpoints import Endpoint
from outer.network.event_loop import ChangeSignal
from outer.network.frames import MAX_HELLO_BYTES, CutOffError, Header, Kind, refusal_error
from outer.network.handshake import Stream, check_access
from outer.network.rejections import RefusedError
from outer.network.run_key import PeerAuth
from outer.transports.mailbox import Mailbox


class StreamGroup:
    """The streams of a group, in both directions, for each other endpoint."""

    def __init__(
        self,
        epoch: str,
        identities: Mapping[Endpoint, str],
        auth: PeerAuth,
        max_payload_bytes: int,
        to_dial: int,
        to_await: int,
        most: int,
    ) -> None:
        """`identities`: what each endpoint must prove. `most`: limit of the streams that one of them may open."""
        self._max_payload_bytes = max_payload_bytes
        self.epoch, self._auth, self._rejections = epoch, auth, auth.rejections
        self.mailbox = Mailbox(identities)
        self.outgoing: dict[Endpoint, list[Stream]] = {e: [] for e in identities}
        self._identities, self._to_dial, self._to_await, self._most = identities, to_dial, to_await, most
        self.idle: dict[Endpoint, asyncio.Queue[Stream]] = {e: asyncio.Queue() for e in identities}
        self._incoming: dict[Endpoint, list[Stream]] = {e: [] for e in identities}
        self._watching: dict[Stream, asyncio.Task[None]] = {}
        self._ending: list[Stream] = []
        self._changed = ChangeSignal()
        self._is_closed = False

    def missing(self) -> list[Endpoint]:
        """The endpoints that have not dialled this one, or that it has not reached."""
        dialled = {e for e, streams in self.outgoing.items() if len(streams) >= self._to_dial}
        return [e for e in self._identities if e not in dialled or len(self._incoming[e]) < self._to_await]

    async def wait_for_all(self) -> None:
        await self._changed.wait_until(self._has_all_incoming)

    def _has_all_incoming(self) -> bool:
        """Whether every endpoint has dialled this one. Raises the error of an endpoint that fails."""
        if all(len(streams) >= self._to_await for streams in self._incoming.values()):
            return True
        self.mailbox.raise_failure(self._identities)
        return False

    def check_identity(self, other: Endpoint, proved: str) -> None:
        """Raise MessageError unless `proved` is what the endpoint's address says that it is."""
        if self._identities.get(other) != proved:
            raise RefusedError("name", f"a stream from peer {proved}, which is not {other} of this group")

    def check_source(self, source: Endpoint, proved: str) -> None:
        """Raise MessageError unless the stream is of an endpoint of the group, which may open one more."""
        self.check_identity(source, proved)
        if len(self._incoming[source]) >= self._most:
            raise RefusedError("streams", f"more than {self._most} streams from {source}")

    def add_outgoing(self, other: Endpoint, stream: Stream) -> None:
        """Keep a dialled stream. The other side sends nothing on it and only ends it."""
        if self._is_closed:
            stream.close()
            return
        self.outgoing[other].append(stream)
        self.idle[other].put_nowait(stream)
        self._watching[stream] = asyncio.create_task(self._watch(other, stream))

    async def take_idle(self, other: Endpoint) -> Stream:
        """Wait for a stream to an endpoint that nobody sends on. Put it into `idle` again."""
        while (stream := await self.idle[other].get()) not in self.outgoing[other]:
            pass  # it has been replaced
        return stream

    async def retire(self, other: Endpoint, stream: Stream) -> None:
        """End a dialled stream when what is sent on it now has been sent. Another one must be there."""
        self.outgoing[other].remove(stream)
        self._watching.pop(stream).cancel()
        self._ending.append(stream)
        with suppress(ConnectionError):
            await stream.write(Header(Kind.END), b"")
        self._ending.remove(stream)
        stream.close()

    async def receive(self, source: Endpoint, stream: Stream) -> None:
        """Move payloads from an incoming stream into the mailbox until the stream ends."""
        self._incoming[source].append(stream)
        self._changed.notify()
        try:
            while not self._is_closed:
                await self.mailbox.wait_for_space(source)
                header, payload = await stream.read(self._max_payload_bytes)
                check_access(stream, self._auth, source)  # it may have been banned meanwhile
                if header.kind is Kind.END:
                    self._incoming[source].remove(stream)
                    stream.close()
                    return
                if header.kind is not Kind.PAYLOAD:
                    raise RefusedError("header", f"{source} sent {header.kind.name}, PAYLOAD expected")
                self.mailbox.put(source, header.tag, payload)
        except ConnectionError as error:
            if isinstance(error, CutOffError):
                self._rejections.add(stream.peer, "truncated", str(error))
            self.lose(source, PeerLost(source.island, str(error)))
        except MessageError as error:
            self._rejections.add_error(stream.peer, error)
            self.lose(source, error)

    def lose(self, other: Endpoint, error: TransportError) -> None:
        """Give up on an endpoint and close its streams, which also informs the endpoint."""
        self.mailbox.fail(other, error)
        for stream in (*self.outgoing[other], *self._incoming[other]):
            stream.close()
        self._changed.notify()

    def close(self) -> None:
        self._is_closed = True
        self.mailbox.fail_all("this group was left")
        for streams in (*self.outgoing.values(), *self._incoming.values(), self._ending):
            for stream in streams:
                stream.close()
        for task in self._watching.values():
            task.cancel()
        self._changed.notify()

    async def _watch(self, other: Endpoint, stream: Stream) -> None:
        try:
            header, payload = await stream.read(MAX_HELLO_BYTES)
            if header.kind is Kind.REFUSAL:
                raise refusal_error(payload)
            raise RefusedError("header", f"{other} wrote on a stream that it only reads")
        except MessageError as error:
            self._rejections.add_error(stream.peer, error)
            self.lose(other, error)
        except ConnectionError as error:
            self.lose(other, PeerLost(other.island, str(error)))
