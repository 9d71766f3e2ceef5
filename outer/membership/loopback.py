"""Messenger and membership for islands that are threads of one process, over a Hub."""

import asyncio
from collections.abc import Callable

from outer.errors import DeadlineError, MessageError, PeerLost, TransportError
from outer.membership.base import Member
from outer.membership.records import check_config_text, check_identity, parse_record, parse_records
from outer.network.endpoints import Endpoint, Handler, Kind, Lane, Traffic
from outer.network.frames import HEADER_BYTES
from outer.network.messages import answer
from outer.network.rpc import MAX_CALL_BYTES
from outer.transports.loopback import Hub, Parcel, call_on_loop


class LoopbackMessenger:
    """A Messenger (outer.network.endpoints) over a Hub. Calls of the bulk lane are counted in
    `traffic`.
    """

    def __init__(self, hub: Hub, run_id: str, me: Endpoint, traffic: Traffic | None = None) -> None:
        self.address = f"loopback:{run_id}/{me}"
        self.traffic = traffic or Traffic()
        self.me = me
        self.island = me.island
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[str, Handler] = {}
        self._waiting: dict[tuple[str, str], set[asyncio.Future[tuple[Kind, bytes]]]] = {}
        """The futures of replies, by the (island, address) that will send them."""
        with hub.lock:
            hub.messengers[self.address] = self
        hub.add_listener(self.on_lost)

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
        with self._hub.lock:
            target: LoopbackMessenger | None = self._hub.messengers.get(address)
        if target is None or self._hub.is_cut(self.island, target.island):
            raise PeerLost(address, "it cannot be reached")
        future: asyncio.Future[tuple[Kind, bytes]] = self._loop.create_future()
        waiting = self._waiting.setdefault(called := (target.island, address), set())
        waiting.add(future)

        def on_reply(reply: tuple[Kind, bytes]) -> None:
            call_on_loop(self._loop, lambda: future.done() or future.set_result(reply))

        try:
            parcel = Parcel(self.island, target.island, kind, HEADER_BYTES + len(body), lane)
            self._hub.deliver(parcel, lambda: target.take_call(self.me, kind, body, on_reply, lane))
            self._count(lane, sent=len(body))
            async with asyncio.timeout(timeout_seconds):
                code, reply = await future
        except TimeoutError:
            raise DeadlineError(
                f"{address} did not answer {kind!r} within {timeout_seconds:g} s"
            ) from None
        finally:
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(called, None)
        self._count(lane, received=len(reply))
        if code is Kind.REFUSAL:
            raise MessageError(reply.decode())
        if longest and len(reply) > longest:
            raise PeerLost(
                address,
                f"its reply to {kind!r} has {len(reply)} bytes, at most {longest} are allowed",
            )
        return reply

    def take_call(
        self,
        source: Endpoint,
        kind: str,
        body: bytes,
        reply: Callable[[tuple[Kind, bytes]], None],
        lane: Lane,
    ) -> None:
        """Answer a call on this messenger's event loop, and pass the answer to `reply` there.
        Any thread may call it.
        """

        async def work() -> None:
            self._count(lane, received=len(body))
            code, result = await answer(self._handlers.get(kind), source, kind, body)
            self._count(lane, sent=len(result))
            status = result.partition(b"\n")[0] if kind in ("part", "mean") else b""
            num_bytes = HEADER_BYTES + len(result)
            parcel = Parcel(
                self.island, source.island, f"{kind}-reply", num_bytes, lane, status=status
            )
            self._hub.deliver(parcel, lambda: reply((code, result)))

        call_on_loop(self._loop, lambda: self._loop.create_task(work()))

    def on_malformed(self, address: str, cause: str) -> None:
        """Do nothing: the islands of one process trust each other."""

    async def close(self) -> None:
        with self._hub.lock:
            self._hub.messengers.pop(self.address, None)
            others = list(self._hub.messengers.values())
        self._hub.remove_listener(self.on_lost)
        self._break(self.island)
        for other in others:
            other.on_lost(self.address)

    def on_lost(self, name: str) -> None:
        """Break the calls to an island that is lost, or to the address of a closed messenger.
        Any thread may call it.
        """
        if name == self.island or any(name in called for called in list(self._waiting)):
            call_on_loop(self._loop, lambda: self._break(name))

    def _break(self, name: str) -> None:
        """Fail the calls to an island or address, or all calls if `name` is this island."""
        for island, address in [key for key in self._waiting if name == self.island or name in key]:
            for future in self._waiting[island, address]:
                if not future.done():
                    future.set_exception(PeerLost(address, "its connection is broken"))

    def _count(self, lane: Lane, *, sent: int | None = None, received: int | None = None) -> None:
        """Count one message. Messages of the control lane are not counted, because they are few and
        small.
        """
        if lane == "bulk":
            self.traffic.bytes_sent += 0 if sent is None else HEADER_BYTES + sent
            self.traffic.bytes_received += 0 if received is None else HEADER_BYTES + received


class LoopbackMembership:
    """A Membership (outer.membership.base) in a Hub. An island that is cut off keeps the records
    that it read last.
    """

    def __init__(self, hub: Hub, run_id: str, island: str) -> None:
        self._hub = hub
        self._run_id = run_id
        self._island = island
        with hub.lock:
            self._records = hub.records[run_id]
        self._own: Member | None = None
        self._known: dict[str, Member] = {}

    async def announce(self, member: Member) -> None:
        if self._is_cut:
            raise TransportError("this island is cut off")
        with self._hub.lock:
            check_identity(member, parse_record(member.island, self._records.get(member.island)))
            self._write(member)
        self._own = member

    def update(self, member: Member) -> None:
        if self._own is not None:
            self._own = member
            self._beat()

    async def members(self) -> dict[str, Member]:
        if not self._is_cut:
            self._beat()
            self._known = self._read()
        own = self._own
        if own is None or self._known.get(own.island) == own:
            return self._known
        return dict(sorted((self._known | {own.island: own}).items()))

    @property
    def trouble(self) -> str:
        return ""

    async def publish_config(self, text: str) -> None:
        check_config_text(text)
        with self._hub.lock:
            self._hub.configs.setdefault(self._run_id, text)

    async def read_config(self) -> str | None:
        with self._hub.lock:
            return self._hub.configs.get(self._run_id)

    async def leave(self) -> None:
        own = self._own
        self._own = None
        if own is None:
            return
        self._known = {name: member for name, member in self._known.items() if name != own.island}
        with self._hub.lock:
            if self._is_held_by(own):
                del self._records[own.island]
                self._hub.num_changes += 1

    @property
    def _is_cut(self) -> bool:
        return self._hub.is_cut(self._island, self._island)

    def _beat(self) -> None:
        """Restore this island's record if it is gone, unless a newer incarnation has replaced
        it.
        """
        with self._hub.lock:
            own = self._own
            if (
                own is not None
                and not self._is_cut
                and (own.island not in self._records or self._is_held_by(own))
            ):
                self._write(own)

    def _write(self, member: Member) -> None:
        """Write this island's record. The caller must hold the lock."""
        text = member.model_dump_json()
        if self._records.get(member.island) != text:
            self._records[member.island] = text
            self._hub.num_changes += 1

    def _read(self) -> dict[str, Member]:
        """Return all records. They are parsed once for all islands of the process, so the result
        must not be changed.
        """
        hub = self._hub
        with hub.lock:
            changes, members = hub.parsed.get(self._run_id, (-1, {}))
            if changes != hub.num_changes:
                members = parse_records(self._records)
                hub.parsed[self._run_id] = hub.num_changes, members
        return members

    def _is_held_by(self, own: Member) -> bool:
        record = parse_record(own.island, self._records.get(own.island))
        return record is not None and record.incarnation == own.incarnation
