"""The streams of one epoch: their endpoints, the payloads that have arrived on them, and the
endpoints that are lost.

If several routes lead to an endpoint, a stream that breaks is replaced at once, if possible: a
relay may be dead although the endpoint is alive. Payloads that were not acknowledged are sent
again. So the receiver on such a stream answers each payload with an ACK, and drops payloads that it
already has.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from outer.errors import MessageError, PeerLost, TransportError
from outer.network.endpoints import Endpoint, Kind, Tag
from outer.network.event_loop import ChangeSignal, Tasks
from outer.network.frames import MAX_HELLO_BYTES, CutOffError, Header, refusal_error
from outer.network.handshake import Stream, check_access
from outer.network.rejections import RefusedError
from outer.network.run_key import PeerAuth
from outer.transports.mailbox import Mailbox

REDIAL_SECONDS = 6.0
"""A broken stream must be replaced within this time. An endpoint that is gone refuses at once."""


@dataclass(frozen=True)
class Redial:
    """Settings for replacing broken streams, both to other endpoints and from them."""

    outgoing: Collection[Endpoint] = ()
    is_incoming: bool = False
    """Whether others may replace their streams to this endpoint."""
    dial: Callable[[Endpoint], Awaitable[None]] | None = None
    """Function that opens a stream to an endpoint and adds it to the group. Raises
    TransportError."""


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
        redial: Redial | None = None,
    ) -> None:
        """Create a group. `identities`: the identity that each endpoint must prove. `most`:
        limit of the streams that an endpoint may open.
        """
        self._max_payload_bytes = max_payload_bytes
        self.epoch = epoch
        self._auth = auth
        self._rejections = auth.rejections
        self.mailbox = Mailbox(identities)
        self.outgoing: dict[Endpoint, list[Stream]] = {e: [] for e in identities}
        self._identities = identities
        self._to_dial = to_dial
        self._to_await = to_await
        self._most = most
        self.idle: dict[Endpoint, asyncio.Queue[Stream]] = {e: asyncio.Queue() for e in identities}
        self._incoming: dict[Endpoint, list[Stream]] = {e: [] for e in identities}
        self._watching: dict[Stream, asyncio.Task[None]] = {}
        self._ending: list[Stream] = []
        self.redial = redial or Redial()
        self._unanswered: dict[tuple[Endpoint, Tag], tuple[Stream, asyncio.Future[bool]]] = {}
        """Payloads that await an ACK: the stream on which each was sent, and a future of whether
        the ACK came before the stream broke."""
        self._had: dict[Endpoint, set[Tag]] = {e: set() for e in identities}
        """Payloads that have arrived in this round and the one before, on streams that others
        may replace."""
        self._newest: dict[Endpoint, int] = {}  # the newest round of arrived payloads
        self._mending = Tasks()
        self._changed = ChangeSignal()
        self._is_closed = False

    def missing(self) -> list[Endpoint]:
        """Return the endpoints that have not dialled this one, or that it has not reached."""
        dialled = {e for e, streams in self.outgoing.items() if len(streams) >= self._to_dial}
        return [
            e
            for e in self._identities
            if e not in dialled or len(self._incoming[e]) < self._to_await
        ]

    async def wait_for_all(self) -> None:
        await self._changed.wait_until(self._has_all_incoming)

    def _has_all_incoming(self) -> bool:
        """Return whether every endpoint has dialled this one. Raises the error of an endpoint
        that fails.
        """
        if all(len(streams) >= self._to_await for streams in self._incoming.values()):
            return True
        self.mailbox.raise_failure(self._identities)
        return False

    def check_identity(self, other: Endpoint, proved: str) -> None:
        """Raise MessageError unless `proved` is the identity in the endpoint's address."""
        if self._identities.get(other) != proved:
            raise RefusedError(
                "name", f"a stream from peer {proved}, which is not {other} of this group"
            )

    def check_source(self, source: Endpoint, proved: str) -> None:
        """Raise MessageError unless the stream belongs to an endpoint of the group that may open
        one more.
        """
        self.check_identity(source, proved)
        if len(self._incoming[source]) >= self._most:
            raise RefusedError("streams", f"more than {self._most} streams from {source}")

    def add_outgoing(self, other: Endpoint, stream: Stream) -> None:
        """Keep a dialled stream. The other side sends no payloads on it and can only end it."""
        if self._is_closed:
            stream.close()
            return
        self.outgoing[other].append(stream)
        self.idle[other].put_nowait(stream)
        self._watching[stream] = asyncio.create_task(self._watch(other, stream))

    async def deliver(self, other: Endpoint, header: Header, payload: memoryview) -> None:
        """Send a payload until the endpoint has acknowledged it, on another stream if one
        breaks. Raises TransportError.
        """
        key = (other, header.tag)
        has_come = False
        try:
            while not has_come:
                stream = await self.take_idle(other)
                answer = asyncio.get_running_loop().create_future()
                self._unanswered[key] = stream, answer
                try:
                    await stream.write(header, payload)
                except ConnectionError as error:
                    self._break(other, stream, error)
                finally:
                    self.idle[other].put_nowait(stream)
                has_come = await answer
                if not has_come and (error := self.mailbox.failure_of(other)):
                    raise error
        finally:
            self._unanswered.pop(key, None)

    async def take_idle(self, other: Endpoint) -> Stream:
        """Wait for a stream to an endpoint on which no task sends. Put it into `idle` again
        afterwards. Raises TransportError.
        """
        while (stream := await self.idle[other].get()) not in self.outgoing[other]:
            if error := self.mailbox.failure_of(other):
                self.idle[other].put_nowait(stream)  # for the next task that waits
                raise error
        return stream

    async def retire(self, other: Endpoint, stream: Stream) -> None:
        """End a dialled stream when the payload that is being sent on it has been sent. Another
        stream must exist.
        """
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
                check_access(
                    stream, self._auth, source
                )  # it may have been banned since the stream opened
                if header.kind is Kind.END:
                    self._incoming[source].remove(stream)
                    stream.close()
                    return
                if header.kind is not Kind.PAYLOAD:
                    raise RefusedError(
                        "header", f"{source} sent {header.kind.name}, PAYLOAD expected"
                    )
                if not self.redial.is_incoming:
                    self.mailbox.put(source, header.tag, payload)
                    continue
                if self._is_new(source, header.tag):
                    self.mailbox.put(source, header.tag, payload)
                await stream.write(Header(Kind.ACK, tag=header.tag), b"")
        except ConnectionError as error:
            if self.redial.is_incoming and not self._is_closed:
                self._mending.start(
                    self._expect(source, stream, PeerLost(source.island, str(error)))
                )
                return
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
        self._give_up(lambda endpoint, _: endpoint == other)
        self._changed.notify()

    def close(self) -> None:
        self._is_closed = True
        self.mailbox.fail_all("this group was left")
        for streams in (*self.outgoing.values(), *self._incoming.values(), self._ending):
            for stream in streams:
                stream.close()
        for task in self._watching.values():
            task.cancel()
        self._mending.cancel()
        self._give_up(lambda endpoint, stream: True)
        self._changed.notify()

    async def _watch(self, other: Endpoint, stream: Stream) -> None:
        try:
            header, payload = await stream.read(MAX_HELLO_BYTES)
            while header.kind is Kind.ACK and other in self.redial.outgoing:
                if answer := self._unanswered.pop((other, header.tag), None):
                    _settle(answer[1], is_there=True)
                header, payload = await stream.read(MAX_HELLO_BYTES)
            if header.kind is Kind.REFUSAL:
                raise refusal_error(payload)
            raise RefusedError("header", f"{other} wrote on a stream that it only reads")
        except MessageError as error:
            self._rejections.add_error(stream.peer, error)
            self.lose(other, error)
        except ConnectionError as error:
            self._break(other, stream, error)

    def _break(self, other: Endpoint, stream: Stream, error: ConnectionError) -> None:
        """Handle a dialled stream that has broken: replace it if possible, otherwise give up on
        the endpoint.
        """
        lost = PeerLost(other.island, str(error))
        if (
            other not in self.redial.outgoing
            or isinstance(error, ConnectionRefusedError)
            or self._is_closed
        ):
            self.lose(other, lost)
        elif stream in self.outgoing[other]:
            self.outgoing[other].remove(stream)
            self._watching.pop(stream).cancel()
            stream.close()
            self._mending.start(self._replace(other, stream))
        self._give_up(lambda _, broken: broken is stream)

    async def _replace(self, other: Endpoint, broken: Stream) -> None:
        """Dial an endpoint again, or give up on it if that fails."""
        assert self.redial.dial is not None, "`outgoing` is empty without it"
        try:
            async with asyncio.timeout(REDIAL_SECONDS):
                await self.redial.dial(other)
        except TransportError as error:
            self.lose(other, error)
        except TimeoutError:
            self.lose(
                other,
                PeerLost(
                    other.island, f"{other} was not reached again within {REDIAL_SECONDS:g} s"
                ),
            )
        self.idle[other].put_nowait(
            broken
        )  # Wakes a task that waits for a stream, so that it gets the error.

    async def _expect(self, source: Endpoint, stream: Stream, lost: PeerLost) -> None:
        """Wait for the stream that replaces a broken one, or give up on its source if none
        comes.
        """
        stream.close()
        self._incoming[source].remove(stream)
        await self._changed.wait_until(
            lambda: (
                len(self._incoming[source]) >= self._to_await
                or self.mailbox.failure_of(source) is not None
            ),
            REDIAL_SECONDS,
        )
        if len(self._incoming[source]) < self._to_await:
            self.lose(source, lost)

    def _is_new(self, source: Endpoint, tag: Tag) -> bool:
        """Return whether no payload with this tag has come from the source, and remember the
        tag.
        """
        had = self._had[source]
        newest = self._newest.get(source, 0)
        if tag in had:
            return False
        if tag.round > newest:  # payloads of rounds before the last one do not come again
            self._newest[source] = tag.round
            had -= {other for other in had if other.round < newest}
        had.add(tag)
        return True

    def _give_up(self, concerns: Callable[[Endpoint, Stream], bool]) -> None:
        """Mark unacknowledged payloads to these endpoints and on these streams as not delivered,
        so that they are sent again or fail.
        """
        for (endpoint, _), (stream, answer) in list(self._unanswered.items()):
            if concerns(endpoint, stream):
                _settle(answer, is_there=False)


def _settle(answer: "asyncio.Future[bool]", *, is_there: bool) -> None:
    if not answer.done():
        answer.set_result(is_there)
