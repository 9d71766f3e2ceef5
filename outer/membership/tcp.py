"""Calls over TCP, and records at rendezvous, for islands that reach each other directly. Nothing is
encrypted.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from outer.errors import (
    InputError,
    MessageError,
    TransportError,
    UnreachableError,
    first_line,
    is_about_run_key,
)
from outer.identity.access import Access
from outer.membership.base import Member
from outer.membership.records import (
    Announcement,
    ConfigText,
    Kept,
    KnownRuns,
    Publication,
    Records,
    RunInfo,
    RunQuery,
    check_config_text,
    open_records,
    sign_record,
    sign_withdrawal,
)
from outer.membership.rendezvous_link import SCHEME, RendezvousLink, parse_rendezvous_address
from outer.network.endpoints import Endpoint, Traffic
from outer.network.event_loop import ChangeSignal
from outer.network.messages import Message, receive, receive_reply
from outer.network.retry import retry
from outer.network.rpc import StreamMessenger
from outer.network.run_key import PeerAuth, RunKey
from outer.routes.dialer import Dialer

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
CALL_SECONDS = 5.0
LEAVE_SECONDS = 2.0
OTHERS_SECONDS = 2.0
"""Longest wait for the other rendezvous once one of them has answered."""
RETRY_SECONDS = 0.2
PAUSE_SECONDS = 0.02
"""Shortest pause between two requests for records."""
RENDEZVOUS = "rendezvous"
"""Used in place of a run's id in the frames to a rendezvous, because a rendezvous serves many
runs."""


async def open_membership(
    addresses: Sequence[str],
    run_id: str,
    me: Endpoint,
    record_seconds: float,
    connect_seconds: float,
    auth: PeerAuth | None = None,
    dialer: Dialer | None = None,
) -> "TcpMembership":
    """Open a membership at all of these rendezvous. Raises InputError unless at least one of
    them answers.
    """
    auth = auth or PeerAuth()
    # A rendezvous is not an island: it has no name to check, and the islands themselves sign the
    # records in it.
    own = replace(auth, names=None, access=Access())
    messenger = StreamMessenger(RENDEZVOUS, me, (dialer or Dialer()).open_streams, Traffic(), own)
    membership = TcpMembership(messenger, addresses, run_id, record_seconds, auth)
    try:
        await membership.connect(connect_seconds)
    except BaseException:
        await membership.close()
        raise
    return membership


class TcpMembership:
    """A Membership (outer.membership.base) at one or several rendezvous.

    Every rendezvous gets all records, so one that answers is enough. While none answers, the last
    known records remain valid. A rendezvous that comes back empty gets this island's record and
    config again.
    """

    def __init__(
        self,
        messenger: StreamMessenger,
        addresses: Sequence[str],
        run_id: str,
        record_seconds: float,
        auth: PeerAuth,
    ) -> None:
        self._messenger = messenger
        self._run_id = run_id
        self._record_seconds = record_seconds
        self._auth = auth
        self._newest = 0
        """Time of this island's newest record, in milliseconds."""
        self._links = [
            RendezvousLink(address, record_seconds) for address in dict.fromkeys(addresses)
        ]
        self._own: Member | None = None
        self._config: str | None = None
        self._asked = ChangeSignal()
        self._watching = [asyncio.create_task(self._watch(link)) for link in self._links]
        self._beating: list[asyncio.Task[None]] = []

    async def connect(self, connect_seconds: float) -> None:
        """Wait until a rendezvous has answered. Raises UnreachableError when none answers, or
        all refuse the run key.
        """
        links = self._links
        await self._asked.wait_until(
            lambda: (
                any(link.has_answered for link in links)
                or all(is_about_run_key(link.cause) for link in links)
            ),
            connect_seconds,
        )
        if not any(link.has_answered for link in links):
            raise unreachable_error(connect_seconds, {link.address: link.cause for link in links})
        await self._asked.wait_until(lambda: all(link.was_asked for link in links), OTHERS_SECONDS)

    async def announce(self, member: Member) -> None:
        assert member.identity == self._auth.island.public, (
            "a record is signed with the key that it names"
        )
        self._newest = max(
            self._newest, self._auth.names.newest(member.island) if self._auth.names else 0
        )
        if not await self._announce_everywhere(member):  # this machine's clock was set back
            await self._announce_everywhere(member)
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
                if self._auth.access.ban(island, member.identity):
                    continue
                found[island] = max(
                    found.get(island, member), member, key=lambda m: (m.round, m.tokens)
                )
        own = {self._own.island: self._own} if self._own else {}
        return dict(sorted((found | own).items()))

    @property
    def trouble(self) -> str:
        return ""

    async def publish_config(self, text: str) -> None:
        check_config_text(text)
        self._config = await self.read_config() or text
        await self._call_all("publish", Publication(run=self._run_id, text=self._config))

    async def read_config(self) -> str | None:
        replies = await self._call_all("config", RunQuery(run=self._run_id))
        texts = [(await receive(ConfigText, reply)).text for reply in replies]
        return next((text for text in texts if text is not None), self._config)

    async def leave(self) -> None:
        own = self._own
        self._own = None
        for task in self._beating:
            task.cancel()
        self._beating = []
        if own is None:
            return
        for link in self._links:
            link.forget(own.island)
            link.is_announced = False
        withdrawal = sign_withdrawal(self._auth.island, self._run_id, own, self._next_time())
        with suppress(InputError):
            await self._call_all("leave", withdrawal, LEAVE_SECONDS)

    async def close(self) -> None:
        for task in (*self._watching, *self._beating):
            task.cancel()
        await self._messenger.close()

    async def _watch(self, link: RendezvousLink) -> None:
        while True:
            try:
                await self._ask(link)
            except TransportError as error:
                link.on_lost(error)
            link.was_asked = True
            self._asked.notify()
            await asyncio.sleep(PAUSE_SECONDS if link.is_up else RETRY_SECONDS)

    async def _ask(self, link: RendezvousLink) -> None:
        query = RunQuery(run=self._run_id, server=link.server, seen=link.version)
        reply = await self._call(link, "members", query)
        records = await receive_reply(self._messenger, link.target, Records, reply)
        # In a thread, because hundreds of signatures may have to be checked.
        found = await asyncio.to_thread(open_records, self._run_id, records.records, self._auth)
        link.on_answer(records, found)
        if self._config is not None and not records.has_config:
            # A rendezvous that refuses the config also refuses the record, and `_beat` logs this.
            with suppress(MessageError):
                await self._call(link, "publish", Publication(run=self._run_id, text=self._config))

    async def _beat(self, link: RendezvousLink) -> None:
        """Keep this island's record alive at one rendezvous until `leave`."""
        refusal = ""
        while self._own is not None:
            link.wake.clear()
            try:
                kind = "beat" if link.is_announced else "announce"
                kept = await receive(
                    Kept, await self._call(link, kind, self._announcement(self._own))
                )
                self._newest = max(self._newest, kept.newest)
                link.is_announced = True
                refusal = ""
            except MessageError as error:
                if str(error) != refusal:
                    log.warning("%s refuses this island's record: %s", link.address, error)
                refusal = str(error)
            except TransportError:  # `_watch` logs it
                pass
            with suppress(TimeoutError):
                async with asyncio.timeout(min(BEAT_SECONDS, self._record_seconds / 4)):
                    await link.wake.wait()

    async def _call(
        self,
        link: RendezvousLink,
        kind: str,
        message: Message,
        timeout_seconds: float = CALL_SECONDS,
    ) -> bytes:
        return await self._messenger.call(
            link.target, kind, message.encode(), timeout_seconds=timeout_seconds
        )

    async def _call_all(
        self, kind: str, message: Message, timeout_seconds: float = CALL_SECONDS
    ) -> list[bytes]:
        """Call all rendezvous and return the replies of those that can be reached. Raises
        InputError if one refuses.
        """
        calls = (self._call(link, kind, message, timeout_seconds) for link in self._links)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, MessageError):
                raise InputError(str(reply))
            if isinstance(reply, BaseException) and not isinstance(reply, TransportError):
                raise reply
        return [reply for reply in replies if isinstance(reply, bytes)]

    async def _announce_everywhere(self, member: Member) -> bool:
        """Announce this island. Return False if a rendezvous knows a newer record; the next
        announcement then has a higher time.
        """
        announcement = self._announcement(member)
        newest = [
            (await receive(Kept, reply)).newest
            for reply in await self._call_all("announce", announcement)
        ]
        self._newest = max(
            [self._newest, *newest]
        )  # A rendezvous that does not answer gets the record later.
        return max(newest, default=0) <= announcement.record.time

    def _announcement(self, member: Member) -> Announcement:
        record = sign_record(self._auth.island, self._run_id, member, self._next_time())
        return Announcement(run=self._run_id, record=record, life_seconds=self._record_seconds)

    def _next_time(self) -> int:
        """Return the time of a new statement, in milliseconds. It is higher than all earlier
        ones, even if the clock is set back.
        """
        self._newest = max(int(time.time() * 1000), self._newest + 1)
        return self._newest


async def find_runs_at_rendezvous(
    address: str, connect_seconds: float, key: RunKey | None, dialer: Dialer | None = None
) -> dict[str, RunInfo]:
    """Return the runs at a rendezvous, by id. Raises InputError when the rendezvous cannot be
    reached.
    """
    parse_rendezvous_address(address)
    open_streams = (dialer or Dialer()).open_streams
    auth = PeerAuth(key, names=None)
    messenger = StreamMessenger(RENDEZVOUS, Endpoint("visitor", 0), open_streams, Traffic(), auth)
    target = address.removeprefix(SCHEME)
    deadline = time.monotonic() + connect_seconds
    cause = "no answer"

    async def ask() -> bytes | None:
        nonlocal cause
        if (left := deadline - time.monotonic()) <= 0:
            return None
        try:
            return await messenger.call(target, "runs", b"", timeout_seconds=left)
        except TransportError as error:
            cause = first_line(error)
            if is_about_run_key(cause):
                raise unreachable_error(connect_seconds, {address: cause}) from None
            return None

    try:
        reply = await retry(ask, seconds=connect_seconds, pause_seconds=RETRY_SECONDS)
    finally:
        await messenger.close()
    if not reply:
        raise unreachable_error(connect_seconds, {address: cause})
    found = await receive(KnownRuns, reply)
    return {name: RunInfo(run.text, tuple(run.islands)) for name, run in found.runs.items()}


def unreachable_error(connect_seconds: float, causes: Mapping[str, str]) -> UnreachableError:
    if all(map(is_about_run_key, causes.values())):
        return UnreachableError(
            f"island.bootstrap: {'; '.join(f'{address}: {causes[address]}' for address in causes)}"
        )
    return UnreachableError(
        f"island.bootstrap: {', '.join(causes)} did not answer within {connect_seconds:g} s "
        f"({'; '.join(dict.fromkeys(causes.values()))}); check that `diloco bootstrap --rendezvous "
        "tcp` runs there and "
        "that its port is open. With several addresses, one that answers is enough"
    )
