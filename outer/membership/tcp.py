"""Calls over TCP, and records kept at rendezvous, for islands that reach each other directly. Nothing is encrypted."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from pydantic import BaseModel

from outer.errors import InputError, MessageError, PeerLost, TransportError
from outer.keys import RunKey, Trust
from outer.membership.base import Member
from outer.membership.calls import StreamMessenger
from outer.membership.link import SCHEME, Link
from outer.membership.records import (
    Announcement,
    ConfigText,
    KnownRuns,
    Parting,
    Publication,
    Question,
    Records,
    RunInfo,
    check_config_text,
    parse_message,
)
from outer.transports.base import Endpoint, Traffic

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
CALL_SECONDS = 5.0
LEAVE_SECONDS = 2.0
OTHERS_SECONDS = 2.0
"""Once one rendezvous has answered, the others are waited for so long."""
RETRY_SECONDS = 0.2
PAUSE_SECONDS = 0.02
"""Between two questions, however fast the answers come."""
RENDEZVOUS = "rendezvous"
"""What stands for a run's id in the frames to a rendezvous, which serves many runs."""


async def listen(messenger: StreamMessenger, host: str, port: int, announce_host: str | None = None) -> "TcpMessenger":
    """The messenger, serving on a host and port. Raises OSError."""
    server = await asyncio.start_server(messenger.accept, host, port)
    messenger.address = f"{announce_host or host}:{server.sockets[0].getsockname()[1]}"
    return TcpMessenger(messenger, server)


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to `host:port`. Raises PeerLost."""
    host, _, port = address.rpartition(":")
    try:
        return await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError, OverflowError) as error:
        raise PeerLost(address[:80], f"it cannot be reached: {error}") from None


class TcpMessenger:
    """See outer.membership.base.Messenger."""

    def __init__(self, messenger: StreamMessenger, server: asyncio.Server) -> None:
        self._messenger, self._server = messenger, server
        self.serve = messenger.serve
        self.call = messenger.call

    @property
    def address(self) -> str:
        return self._messenger.address

    async def close(self) -> None:
        self._server.close()
        await self._messenger.close()


async def open_membership(
    addresses: Sequence[str],
    run_id: str,
    me: Endpoint,
    record_seconds: float,
    connect_seconds: float,
    trust: Trust | None = None,
) -> "TcpMembership":
    """The run's records at all of these rendezvous, at least one of which answers. Raises InputError."""
    for address in addresses:
        parse_rendezvous(address)
    messenger = StreamMessenger(RENDEZVOUS, me, dial, Traffic(), trust)
    membership = TcpMembership(messenger, addresses, run_id, record_seconds)
    try:
        await membership.connect(connect_seconds)
    except BaseException:
        await membership.close()
        raise
    return membership


class TcpMembership:
    """See outer.membership.base.Membership.

    Each rendezvous is told everything, and what any of them tells counts: one that answers is enough. While none
    does, the last known records stand, and one that comes back empty is told all that this island knows.
    """

    def __init__(
        self, messenger: StreamMessenger, addresses: Sequence[str], run_id: str, record_seconds: float
    ) -> None:
        self._messenger, self._run_id, self._record_seconds = messenger, run_id, record_seconds
        self._links = [Link(address, record_seconds) for address in dict.fromkeys(addresses)]
        self._own: Member | None = None
        self._config: str | None = None
        self._watching = [asyncio.create_task(self._watch(link)) for link in self._links]
        self._beating: list[asyncio.Task[None]] = []

    async def connect(self, connect_seconds: float) -> None:
        """Wait until a rendezvous has answered. Raises InputError."""
        first = [asyncio.create_task(link.answered.wait()) for link in self._links]
        tried = [asyncio.create_task(link.tried.wait()) for link in self._links]
        try:
            done, _ = await asyncio.wait(first, timeout=connect_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                addresses = [link.address for link in self._links]
                raise unanswered(addresses, connect_seconds, *(link.cause for link in self._links))
            await asyncio.wait(tried, timeout=OTHERS_SECONDS)
        finally:
            for task in (*first, *tried):
                task.cancel()

    async def announce(self, member: Member) -> None:
        await self._call_all("announce", self._announcement(member))
        self._own = member
        if not self._beating:
            self._beating = [asyncio.create_task(self._beat(link)) for link in self._links]

    def update(self, member: Member) -> None:
        if self._own is None:
            return
        self._own = member
        for link in self._links:
            link.wake.set()

    async def members(self) -> dict[str, Member]:
        found: dict[str, Member] = {}
        for link in [link for link in self._links if link.is_up] or self._links:
            for island, member in link.known().items():
                other = found.get(island, member)
                found[island] = max(other, member, key=lambda m: (m.round, m.tokens))
        own = {self._own.island: self._own} if self._own else {}
        return dict(sorted((found | own).items()))

    async def publish_config(self, text: str) -> None:
        check_config_text(text)
        self._config = await self.read_config() or text
        await self._call_all("publish", Publication(run=self._run_id, text=self._config))

    async def read_config(self) -> str | None:
        replies = await self._call_all("config", Question(run=self._run_id))
        texts = [parse_message(ConfigText, reply).text for reply in replies]
        return next((text for text in texts if text is not None), self._config)

    async def leave(self) -> None:
        own, self._own = self._own, None
        for task in self._beating:
            task.cancel()
        self._beating = []
        if own is None:
            return
        for link in self._links:
            link.forget(own.island)
            link.has_place = False
        parting = Parting(run=self._run_id, island=own.island, incarnation=own.incarnation)
        with suppress(InputError):
            await self._call_all("leave", parting, LEAVE_SECONDS)

    async def close(self) -> None:
        """Say no more and hear no more. Idempotent."""
        for task in (*self._watching, *self._beating):
            task.cancel()
        await self._messenger.close()

    async def _watch(self, link: Link) -> None:
        """Keep up with one rendezvous for as long as this membership is open."""
        while True:
            try:
                await self._ask(link)
            except TransportError as error:
                link.on_lost(error)
            link.tried.set()
            await asyncio.sleep(PAUSE_SECONDS if link.is_up else RETRY_SECONDS)

    async def _ask(self, link: Link) -> None:
        reply = await self._call(link, "members", Question(run=self._run_id, seen=link.digest))
        records = parse_message(Records, reply)
        link.on_answer(records)
        if self._config is not None and not records.has_config:
            with suppress(MessageError):  # refused, as the record is; `_beat` says so
                await self._call(link, "publish", Publication(run=self._run_id, text=self._config))

    async def _beat(self, link: Link) -> None:
        """Keep this island's record alive at one rendezvous until `leave`."""
        refusal = ""
        while self._own is not None:
            link.wake.clear()
            try:
                kind = "beat" if link.has_place else "announce"
                await self._call(link, kind, self._announcement(self._own))
                link.has_place, refusal = True, ""
            except MessageError as error:
                if str(error) != refusal:
                    log.warning("%s refuses this island's record: %s", link.address, error)
                refusal = str(error)
            except TransportError:  # `_watch` says so
                pass
            with suppress(TimeoutError):
                async with asyncio.timeout(min(BEAT_SECONDS, self._record_seconds / 4)):
                    await link.wake.wait()

    async def _call(self, link: Link, kind: str, message: BaseModel, timeout_seconds: float = CALL_SECONDS) -> bytes:
        body = message.model_dump_json().encode()
        return await self._messenger.call(link.target, kind, body, timeout_seconds=timeout_seconds)

    async def _call_all(self, kind: str, message: BaseModel, timeout_seconds: float = CALL_SECONDS) -> list[bytes]:
        """The replies of those rendezvous that can be reached, in their order. Raises InputError when one refuses."""
        calls = (self._call(link, kind, message, timeout_seconds) for link in self._links)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, MessageError):
                raise InputError(str(reply))
            if isinstance(reply, BaseException) and not isinstance(reply, TransportError):
                raise reply
        return [reply for reply in replies if isinstance(reply, bytes)]

    def _announcement(self, member: Member) -> Announcement:
        return Announcement(run=self._run_id, member=member, life_seconds=self._record_seconds)


async def visit_rendezvous(address: str, connect_seconds: float, run_key: RunKey | None = None) -> dict[str, RunInfo]:
    """The runs at a rendezvous, by id. Raises InputError when it cannot be reached."""
    parse_rendezvous(address)
    messenger = StreamMessenger(RENDEZVOUS, Endpoint("visitor", 0), dial, Traffic(), Trust(run_key))
    try:
        reply = await _call_until(messenger, address, connect_seconds)
    finally:
        await messenger.close()
    return {name: RunInfo(run.text, tuple(run.islands)) for name, run in parse_message(KnownRuns, reply).runs.items()}


async def _call_until(messenger: StreamMessenger, address: str, connect_seconds: float) -> bytes:
    started, cause = time.monotonic(), "no answer"
    while (left := connect_seconds - (time.monotonic() - started)) > 0:
        try:
            return await messenger.call(address.removeprefix(SCHEME), "runs", b"", timeout_seconds=left)
        except TransportError as error:
            cause = error.cause if isinstance(error, PeerLost) else str(error)
        await asyncio.sleep(RETRY_SECONDS)
    raise unanswered([address], connect_seconds, cause)


def unanswered(addresses: Sequence[str], connect_seconds: float, *causes: str) -> InputError:
    """The error of an island that finds no rendezvous."""
    return InputError(
        f"island.bootstrap: {', '.join(addresses)} did not answer within {connect_seconds:g} s "
        f"({'; '.join(dict.fromkeys(causes))}); check that `diloco bootstrap --rendezvous tcp` runs there and that "
        "its port is open. Of several addresses one that answers is enough"
    )


def parse_rendezvous(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`. Raises InputError."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    if not address.startswith(SCHEME) or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"island.bootstrap: got {address!r}; with outer.transport gloo it is tcp://HOST:PORT, "
            "as `diloco bootstrap --rendezvous tcp` prints it"
        )
    return host.strip("[]"), int(port)
