"""`diloco bootstrap --rendezvous tcp`: keeps the records and configs of runs, for islands that need no libp2p.

It holds nothing that the islands do not know: killed and started anew at the same address, it is told all of it again
within seconds, and several at once hold the same.
"""

import asyncio
import hashlib
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field

from pydantic import BaseModel

from outer.errors import InputError, MessageError
from outer.keys import RunKey, Trust
from outer.loop import LoopThread
from outer.membership.base import Handler, Member
from outer.membership.calls import StreamMessenger
from outer.membership.records import (
    MAX_CONFIG_BYTES,
    MAX_RECORD_BYTES,
    Announcement,
    ConfigText,
    KnownRun,
    KnownRuns,
    Parting,
    Publication,
    Question,
    Records,
    check_config_text,
    check_identity,
    parse_message,
)
from outer.membership.tcp import RENDEZVOUS, SCHEME, TcpMessenger, dial, listen
from outer.transports.base import Endpoint, Traffic

MAX_RUNS = 32
MAX_RECORDS = 1024
"""Of one run."""
MAX_RUN_BYTES = 8 << 20
"""Of all records of one run together."""
MAX_CALL_BYTES = MAX_RECORD_BYTES + MAX_CONFIG_BYTES
"""Of one call; a connection with a longer one is dropped before it is read."""
HOLD_SECONDS = 1.0
"""Who has seen all there is gets its answer at the next change, or after so long."""


@dataclass
class _Record:
    member: Member
    text: str
    expires_at: float


@dataclass
class _Run:
    config: str | None = None
    records: dict[str, _Record] = field(default_factory=dict)
    """By island."""
    used_at: float = 0.0

    @property
    def digest(self) -> str:
        texts = sorted(record.text for record in self.records.values())
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]

    def drop_dead(self) -> None:
        now = time.monotonic()
        self.records = {island: record for island, record in self.records.items() if record.expires_at > now}


class RecordServer:
    """The calls of a rendezvous. What it keeps is bounded, whatever it is sent."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._runs: dict[str, _Run] = {}
        self._changed = asyncio.Event()

    @property
    def handlers(self) -> dict[str, Handler]:
        """By kind of call."""
        return {
            "announce": self._announce,
            "beat": self._beat,
            "members": self._members,
            "publish": self._publish,
            "config": self._config,
            "leave": self._leave,
            "runs": self._list_runs,
        }

    async def _announce(self, source: Endpoint, body: bytes) -> bytes:
        """Take the place of the island's earlier incarnation, if there is one."""
        self._keep(parse_message(Announcement, body))
        return b""

    async def _beat(self, source: Endpoint, body: bytes) -> bytes:
        """Keep the record alive, unless the island was restarted since: its old process may still run."""
        announcement = parse_message(Announcement, body)
        member = announcement.member
        held = self._look(announcement.run).records.get(member.island)
        if held is not None and held.member.incarnation != member.incarnation:
            check_identity(member, held.member)
            raise MessageError(f"the island {member.island!r} was started anew; this is not its newest process")
        self._keep(announcement)
        return b""

    async def _members(self, source: Endpoint, body: bytes) -> bytes:
        """The run's records. Who has seen them all waits for a change."""
        question = parse_message(Question, body)
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_SECONDS):
                while self._look(question.run).digest == question.seen:
                    await self._changed.wait()
        run = self._look(question.run)
        texts = {island: record.text for island, record in run.records.items()}
        records = None if run.digest == question.seen else texts
        has_config = run.config is not None
        return _pack(Records(server=self._id, digest=run.digest, records=records, has_config=has_config))

    async def _publish(self, source: Endpoint, body: bytes) -> bytes:
        """Keep the run's config, unless there is one."""
        publication = parse_message(Publication, body)
        check_config_text(publication.text)
        run = self._run(publication.run)
        if run.config is None:
            run.config = publication.text
        return b""

    async def _config(self, source: Endpoint, body: bytes) -> bytes:
        return _pack(ConfigText(text=self._look(parse_message(Question, body).run).config))

    async def _leave(self, source: Endpoint, body: bytes) -> bytes:
        parting = parse_message(Parting, body)
        records = self._look(parting.run).records
        held = records.get(parting.island)
        if held is not None and held.member.incarnation == parting.incarnation:
            del records[parting.island]
            self._tell_all()
        return b""

    async def _list_runs(self, source: Endpoint, body: bytes) -> bytes:
        runs = {name: self._look(name) for name in self._runs}
        known = {n: KnownRun(text=r.config, islands=sorted(r.records)) for n, r in runs.items() if r.config is not None}
        return _pack(KnownRuns(runs=known))

    def _keep(self, announcement: Announcement) -> None:
        """Put the record in its run. Raises InputError for a namesake, MessageError where there is no room."""
        member, run = announcement.member, self._run(announcement.run)
        held = run.records.get(member.island)
        check_identity(member, held.member if held is not None else None)
        text = member.model_dump_json()
        others = [record for island, record in run.records.items() if island != member.island]
        num_bytes = sum(len(record.text) for record in others) + len(text)
        if len(text) > MAX_RECORD_BYTES or len(others) >= MAX_RECORDS or num_bytes > MAX_RUN_BYTES:
            raise MessageError(
                f"a record of {len(text)} bytes, {num_bytes} with the {len(others)} others of the run; a rendezvous "
                f"takes {MAX_RECORD_BYTES} bytes in one and {MAX_RUN_BYTES} in all, of {MAX_RECORDS} islands"
            )
        run.records[member.island] = _Record(member, text, time.monotonic() + announcement.life_seconds)
        if held is None or held.text != text:
            self._tell_all()

    def _look(self, name: str) -> "_Run":
        """The run with its live records; an empty one, which is not kept, when it is unknown."""
        run = self._runs.get(name) or _Run()
        run.drop_dead()
        return run

    def _run(self, name: str) -> "_Run":
        """The run, made if it is new. Where there are too many, one goes whose islands are dead, the oldest first."""
        if name not in self._runs and len(self._runs) >= MAX_RUNS:
            idle = [other for other in self._runs if not self._look(other).records]
            if not idle:
                raise MessageError(f"this rendezvous serves {MAX_RUNS} runs already; start another one")
            del self._runs[min(idle, key=lambda other: self._runs[other].used_at)]
        run = self._runs.setdefault(name, _Run())
        run.used_at = time.monotonic()
        run.drop_dead()
        return run

    def _tell_all(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Rendezvous:
    """A rendezvous that is served on a thread of its own."""

    def __init__(self, loop: LoopThread, messenger: TcpMessenger) -> None:
        self._loop, self._messenger = loop, messenger
        self.address = f"{SCHEME}{messenger.address}"
        self._is_closed = False

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.try_to(self._messenger.close(), 5)
            self._loop.close()


def serve_rendezvous(host: str, port: int, run_key: RunKey | None = None) -> Rendezvous:
    """Serve a rendezvous; port 0: any free one. With a key it answers only those that hold it.

    Raises InputError when the address is taken.
    """
    loop = LoopThread()
    try:
        return Rendezvous(loop, loop.run(_open(host, port, Trust(run_key)), timeout_seconds=10))
    except BaseException:
        loop.close()
        raise


async def _open(host: str, port: int, trust: Trust) -> TcpMessenger:
    messenger = StreamMessenger(RENDEZVOUS, Endpoint(RENDEZVOUS, 0), dial, Traffic(), trust, MAX_CALL_BYTES)
    for kind, handler in RecordServer().handlers.items():
        messenger.serve(kind, handler)
    try:
        return await listen(messenger, host, port)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from None


def _pack(reply: BaseModel) -> bytes:
    return reply.model_dump_json().encode()
