"""Calls over TCP and records in a TCPStore, for islands that reach each other directly. Nothing is encrypted."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from outer.errors import InputError, PeerLost, TransportError
from outer.membership.base import Member
from outer.membership.calls import StreamMessenger
from outer.membership.records import (
    RUNS_KEY,
    RunInfo,
    check_config_text,
    check_identity,
    parse_record,
    parse_records,
)
from outer.transports.base import Endpoint, Traffic
from outer.transports.gloo import first_line, in_thread

BEAT_SECONDS = 1.0
STORE_SECONDS = 5.0
RETRY_SECONDS = 0.2
SCHEME = "tcp://"
T = TypeVar("T")


async def open_messenger(
    run_id: str, me: Endpoint, listen: tuple[str, int], announce_host: str | None, traffic: Traffic
) -> "TcpMessenger":
    """A messenger that listens on a host and port; 0: any free port. Raises InputError."""
    messenger = StreamMessenger(run_id, me, _dial, traffic)
    try:
        server = await asyncio.start_server(messenger.accept, *listen)
    except OSError as error:
        raise InputError(
            f"island.listen_host, island.listen_port: cannot listen on {listen[0]}:{listen[1]}: {error.strerror}; "
            "choose an address of this machine and a free port (0: any)"
        ) from None
    messenger.address = f"{announce_host or listen[0]}:{server.sockets[0].getsockname()[1]}"
    return TcpMessenger(messenger, server)


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


class TcpMembership:
    """See outer.membership.base.Membership."""

    def __init__(self, store: dist.Store, run_id: str, silent_seconds: float) -> None:
        self._store = dist.PrefixStore(run_id, store)
        self._root, self._run_id = store, run_id
        self._silent_seconds = silent_seconds
        """An island whose counter has not moved for so long is not alive."""
        self._own: Member | None = None
        self._beats: dict[str, tuple[str, int, float]] = {}
        """By island: incarnation, its counter, and when that was last seen to move."""
        self._beating: asyncio.Task[None] | None = None

    async def announce(self, member: Member) -> None:
        other = await self._live_namesake(member)
        check_identity(member, other)
        await self._run(lambda: self._write(member))
        self._own = member
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())

    def update(self, member: Member) -> None:
        self._own = member
        self._updating = asyncio.create_task(self._run(lambda: self._write(member)))

    async def members(self) -> dict[str, Member]:
        records, beats = await self._run(self._read)
        members = parse_records(records)
        now = time.monotonic()
        for island, member in members.items():
            seen = self._beats.get(island)
            if seen is None or seen[:2] != (member.incarnation, beats[island]):
                self._beats[island] = (member.incarnation, beats[island], now)
        return {island: m for island, m in members.items() if now - self._beats[island][2] < self._silent_seconds}

    async def publish_config(self, text: str) -> None:
        check_config_text(text)

        def publish() -> None:
            self._store.compare_set("config", "", text)
            _add_line(self._root, RUNS_KEY, self._run_id)

        await self._run(publish)

    async def read_config(self) -> str | None:
        return await self._run(lambda: read_config(self._store))

    async def leave(self) -> None:
        own, self._own = self._own, None
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None
        if own is not None:
            with contextlib.suppress(TransportError, TimeoutError):
                async with asyncio.timeout(STORE_SECONDS):
                    await self._run(lambda: self._store.set(f"member/{own.island}", ""))

    async def close(self) -> None:
        """Stop the heartbeat. Idempotent."""
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        while self._own is not None:
            with contextlib.suppress(TransportError):  # the rendezvous may come back; others notice if not
                await self._run(lambda own=self._own: self._store.add(f"beat/{own.island}", 1))
            await asyncio.sleep(min(BEAT_SECONDS, self._silent_seconds / 4))

    async def _live_namesake(self, member: Member) -> Member | None:
        """The other island of this name if its counter moves; a record alone may be a dead island's."""
        started, first = time.monotonic(), None
        while True:
            records, beats = await self._run(self._read)
            other = parse_record(member.island, records.get(member.island))
            if other is None or other.incarnation == member.incarnation:
                return None
            first = beats[member.island] if first is None else first
            if beats[member.island] != first:
                return other
            if time.monotonic() - started > self._silent_seconds:
                return None
            await asyncio.sleep(RETRY_SECONDS)

    def _write(self, member: Member) -> None:
        self._store.set(f"member/{member.island}", member.model_dump_json())
        self._store.add(f"beat/{member.island}", 1)
        _add_line(self._store, "islands", member.island)

    def _read(self) -> tuple[dict[str, bytes], dict[str, int]]:
        """Every island's record and counter; a blocking call."""
        islands = _lines(self._store, "islands")
        records = {island: self._store.get(f"member/{island}") for island in islands}
        return records, {island: self._store.add(f"beat/{island}", 0) for island in islands}

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await in_thread(work)
        except RuntimeError as error:
            raise TransportError(f"the rendezvous has failed: {first_line(error)}") from None


async def connect_store(address: str, connect_seconds: float) -> dist.TCPStore:
    """A client of the rendezvous at `tcp://host:port`. Raises InputError when nothing answers in time."""
    host, port = parse_rendezvous(address)
    started, cause = time.monotonic(), "no answer"
    while (left := connect_seconds - (time.monotonic() - started)) > 0:
        try:
            async with asyncio.timeout(left):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return await in_thread(lambda: open_store(host, port, STORE_SECONDS))
        except (OSError, TimeoutError, RuntimeError) as error:
            cause = first_line(error) if str(error) else cause
        await asyncio.sleep(min(RETRY_SECONDS, max(left, 0)))
    raise InputError(
        f"island.bootstrap: {address} did not answer within {connect_seconds:g} s ({cause}); "
        "check that `diloco bootstrap --rendezvous tcp` runs there and that its port is open"
    )


def open_store(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """A client of a served store; a blocking call. Raises RuntimeError."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def parse_rendezvous(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`. Raises InputError."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    if not address.startswith(SCHEME) or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"island.bootstrap: got {address!r}; with outer.transport gloo it is tcp://HOST:PORT, "
            "as `diloco bootstrap --rendezvous tcp` prints it"
        )
    return host.strip("[]"), int(port)


def read_config(store: dist.Store) -> str | None:
    """The config text under a run's prefix, or None; a blocking call."""
    return store.get("config").decode() if store.check(["config"]) else None


async def visit_rendezvous(address: str, connect_seconds: float) -> dict[str, RunInfo]:
    """The runs at a rendezvous, by id. Raises InputError when it cannot be reached."""
    store = await connect_store(address, connect_seconds)

    runs: dict[str, RunInfo] = {}
    for run_id in sorted(set(await in_thread(lambda: _lines(store, RUNS_KEY)))):
        membership = TcpMembership(store, run_id, STORE_SECONDS)
        text = await membership.read_config()
        if text is not None:
            runs[run_id] = RunInfo(text, tuple(await membership.members()))
    return runs


class Rendezvous:
    """A store that is served: where islands with outer.transport gloo find each other."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._server = socket.create_server((host, port))
        except OSError as error:
            raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from None
        port = self._server.getsockname()[1]
        self._store: dist.TCPStore | None = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._server.detach()
        )
        self.address = f"{SCHEME}{host}:{port}"

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._store = None


def serve_rendezvous(host: str, port: int) -> Rendezvous:
    """Serve a rendezvous; port 0: any free one. Raises InputError when the address is taken."""
    return Rendezvous(host, port)


def _add_line(store: dist.Store, key: str, line: str) -> None:
    """Append a line under a key unless it is there; a blocking call."""
    if line not in _lines(store, key):
        store.append(key, f"{line}\n")  # pyright: ignore[reportAttributeAccessIssue]


def _lines(store: dist.Store, key: str) -> list[str]:
    """The lines appended under a key; a blocking call."""
    if not store.check([key]):
        return []
    return list(dict.fromkeys(store.get(key).decode(errors="replace").split()))


async def _dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    try:
        return await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError, OverflowError) as error:
        raise PeerLost(address[:80], f"it cannot be reached: {error}") from None
