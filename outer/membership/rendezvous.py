"""The rendezvous server (`diloco bootstrap --rendezvous tcp`), which keeps records and configs of
runs without libp2p.

It stores only data that the islands know: after a restart at the same address they send everything
again. Only the owner of a name may be claimed by another island first. With a folder it keeps the
owners over restarts.
"""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path

from outer.errors import InputError, MessageError
from outer.identity.known_names import KnownNames
from outer.membership.base import Member
from outer.membership.records import (
    MAX_CONFIG_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    MAX_RUNS,
    Announcement,
    ConfigText,
    Kept,
    KnownRun,
    KnownRuns,
    Publication,
    Records,
    RunQuery,
    SignedRecord,
    Withdrawal,
    check_config_text,
    check_withdrawal,
    name_taken_error,
    open_record,
)
from outer.membership.tcp import RENDEZVOUS, SCHEME
from outer.network.endpoints import Endpoint, Handler, Traffic
from outer.network.event_loop import ChangeSignal, EventLoopThread
from outer.network.messages import receive
from outer.network.rejections import RefusedError
from outer.network.rpc import StreamMessenger
from outer.network.run_key import PeerAuth, RunKey
from outer.routes.dialer import dial
from outer.routes.streams import listen

MAX_RUN_BYTES = 2 << 20
"""Limit for the records of one run together, so that all of them fit into one reply."""
MAX_CALL_BYTES = MAX_RECORD_BYTES + MAX_CONFIG_BYTES
MAX_NAMES = 8 * MAX_RECORDS  # of islands in the list of all runs, which is one reply
NAMES_SECONDS = 60.0
"""A rendezvous forgets the owners of a run's names when the run has had no island for this time."""
NAMES_PREFIX = "names-"
NAMES_SUFFIX = ".json"
UNKNOWN = 1
"""Stands for the last change to the records of an unknown run."""
HOLD_SECONDS = 1.0
"""A caller that knows all records gets its reply at the next change, or after this time."""


@dataclass
class _Record:
    member: Member
    signed: SignedRecord
    expires_at: float
    version: int
    """Number of the change that stored the record."""


@dataclass
class _RunRecords:
    changes: Iterator[int]
    """Numbers for changes. A later change always has a higher number, over all runs of the
    server.
    """
    config: str | None = None
    records: dict[str, _Record] = field(default_factory=dict)  # by island
    gone: dict[str, int] = field(default_factory=dict)
    """Islands whose records were removed, by island, with the number of the removal, the oldest
    first.
    """
    version: int = field(init=False)
    """Number of the last change."""
    _first: int = field(init=False)
    """Number of the first change from which on all changes are known here."""
    names: KnownNames = field(default_factory=KnownNames)
    """The owners of names, and the times of their newest statements."""
    used_at: float = 0.0
    lived_at: float = field(default_factory=time.monotonic)
    names_path: Path | None = None

    def __post_init__(self) -> None:
        self.version = self._first = next(self.changes)

    def put(self, member: Member, signed: SignedRecord, expires_at: float) -> bool:
        """Store an island's record. Return whether it differs from the stored one."""
        known = self.records.get(member.island)
        if known is not None and known.signed.text == signed.text:
            self.records[member.island] = _Record(member, signed, expires_at, known.version)
            return False
        self.version = next(self.changes)
        self.gone.pop(member.island, None)
        self.records[member.island] = _Record(member, signed, expires_at, self.version)
        return True

    def remove(self, island: str) -> None:
        """Remove an island's record, which must exist."""
        del self.records[island]
        self.version = self.gone[island] = next(self.changes)
        while len(self.gone) > MAX_RECORDS:
            self._first = self.gone.pop(next(iter(self.gone)))

    def since(self, seen: int) -> tuple[dict[str, SignedRecord], list[str], bool]:
        """Return (records changed since change `seen`, islands without a record now, whether it is
        all).
        """
        is_whole = not self._first <= seen <= self.version
        changed = {
            name: record.signed
            for name, record in self.records.items()
            if is_whole or record.version > seen
        }
        return (
            changed,
            [name for name, version in self.gone.items() if version > seen and not is_whole],
            is_whole,
        )

    def drop_dead(self) -> None:
        now = time.monotonic()
        for island in [
            island for island, record in self.records.items() if record.expires_at <= now
        ]:
            self.remove(island)
        if self.records:
            self.lived_at = now
        elif now - self.lived_at > NAMES_SECONDS:
            self.forget_names()

    def forget_names(self) -> None:
        if self.names_path is not None:
            self.names_path.unlink(missing_ok=True)
        self.names = KnownNames(self.names_path)

    def check_owner(self, island: str, key: str, time_ms: int) -> bool:
        """Return whether a statement of an island is the newest. Raises RefusedError if the name is
        another's.
        """
        if self.names.claim(island, key):
            raise RefusedError(
                "name", str(name_taken_error(island, self.names.key_of(island) or ""))
            )
        return time_ms > self.names.newest(island) and self.names.is_newest(island, time_ms)


class RecordServer:
    """Answers the calls to a rendezvous. Its memory is limited, whatever callers send."""

    def __init__(self, folder: Path | None = None) -> None:
        """Create a server. `folder` keeps owners of names over restarts. Raises InputError."""
        self._id = secrets.token_hex(8)
        self._folder = folder
        self._changes = count(UNKNOWN + 1)
        self._runs = (
            {}
            if folder is None
            else {name: self._new_run(name) for name in _remembered_runs(folder)}
        )
        self._changed = ChangeSignal()
        self.handlers: dict[str, Handler] = {
            "announce": self._announce,
            "beat": self._beat,
            "members": self._members,
            "publish": self._publish,
            "config": self._config,
            "leave": self._leave,
            "runs": self._list_runs,
        }

    async def _announce(self, source: Endpoint, body: bytes) -> bytes:
        return self._keep(await receive(Announcement, body))

    async def _beat(self, source: Endpoint, body: bytes) -> bytes:
        """Keep the record alive, unless it comes from an older process of an island that was
        restarted.
        """
        announcement = await receive(Announcement, body)
        member = open_record(announcement.run, announcement.record)
        record = self._find_run(announcement.run).records.get(member.island)
        is_same_island = record is not None and record.member.identity == member.identity
        if (
            record is not None
            and is_same_island
            and record.member.incarnation != member.incarnation
        ):
            raise MessageError(
                f"the island {member.island!r} was restarted; this is not its newest process"
            )
        return self._keep(announcement)

    async def _members(self, source: Endpoint, body: bytes) -> bytes:
        """Reply with the changes to the run's records. If the caller knows all of them, wait for a
        change.
        """
        query = await receive(RunQuery, body)
        seen = query.seen if query.server == self._id else 0
        await self._changed.wait_until(
            lambda: self._find_run(query.run).version != seen, HOLD_SECONDS
        )
        run = self._find_run(query.run)
        records, gone, is_whole = run.since(seen)
        about = {"is_whole": is_whole, "has_config": run.config is not None}
        return Records(
            server=self._id, version=run.version, records=records, gone=gone, **about
        ).encode()

    async def _publish(self, source: Endpoint, body: bytes) -> bytes:
        publication = await receive(Publication, body)
        check_config_text(publication.text)
        run = self._find_or_create_run(publication.run)
        if run.config is None:
            run.config = publication.text
        return b""

    async def _config(self, source: Endpoint, body: bytes) -> bytes:
        query = await receive(RunQuery, body)
        return ConfigText(text=self._find_run(query.run).config).encode()

    async def _leave(self, source: Endpoint, body: bytes) -> bytes:
        withdrawal = await receive(Withdrawal, body)
        check_withdrawal(withdrawal)
        run = self._find_run(withdrawal.run)
        is_new = run.check_owner(withdrawal.island, withdrawal.key, withdrawal.time)
        record = run.records.get(withdrawal.island)
        if is_new and record is not None and record.member.incarnation == withdrawal.incarnation:
            run.remove(withdrawal.island)
            self._changed.notify()
        return b""

    async def _list_runs(self, source: Endpoint, body: bytes) -> bytes:
        runs = {name: self._find_run(name) for name in self._runs}
        known = {
            name: (run.config, sorted(run.records))
            for name, run in runs.items()
            if run.config is not None
        }
        most = (
            MAX_RECORDS
            if sum(len(names) for _, names in known.values()) <= MAX_NAMES
            else MAX_NAMES // MAX_RUNS
        )
        shown = {
            name: KnownRun(text=text, islands=names[:most]) for name, (text, names) in known.items()
        }
        return KnownRuns(runs=shown).encode()

    def _keep(self, announcement: Announcement) -> bytes:
        """Store the record, unless it is older than another, and build the reply.

        Raises MessageError if its island has not signed it, if the name is another island's, or if
        there is no room.
        """
        signed = announcement.record
        member = open_record(announcement.run, signed)
        run = self._find_or_create_run(announcement.run)
        self._check_room(run, member.island, len(signed.text))
        is_new = run.check_owner(member.island, member.identity, signed.time)
        if is_new and run.put(member, signed, time.monotonic() + announcement.life_seconds):
            self._changed.notify()
        return Kept(newest=run.names.newest(member.island)).encode()

    def _check_room(self, run: _RunRecords, island: str, length: int) -> None:
        """Raise MessageError if a record of this length does not fit into the run's memory
        limit.
        """
        others = [record for name, record in run.records.items() if name != island]
        num_bytes = sum(len(record.signed.text) for record in others) + length
        if length > MAX_RECORD_BYTES or len(others) >= MAX_RECORDS or num_bytes > MAX_RUN_BYTES:
            raise MessageError(
                f"a record of {length} bytes, {num_bytes} with the {len(others)} others of the "
                f"run; a rendezvous takes {MAX_RECORD_BYTES} bytes per record and {MAX_RUN_BYTES} "
                f"per run, of {MAX_RECORDS} islands"
            )

    def _find_run(self, name: str) -> _RunRecords:
        """Return the run with its live records. An unknown run is returned empty and is not
        stored.
        """
        run = self._runs.get(name) or _RunRecords(repeat(UNKNOWN))
        run.drop_dead()
        return run

    def _find_or_create_run(self, name: str) -> _RunRecords:
        """Return the run, stored if it is new. Beyond MAX_RUNS it replaces the oldest without live
        islands.
        """
        if name not in self._runs and len(self._runs) >= MAX_RUNS:
            idle = [other for other in self._runs if not self._find_run(other).records]
            if not idle:
                raise MessageError(
                    f"this rendezvous serves {MAX_RUNS} runs already; start another one"
                )
            self._runs.pop(min(idle, key=lambda other: self._runs[other].used_at)).forget_names()
        run = self._runs[name] if name in self._runs else self._new_run(name)
        self._runs[name] = run
        run.used_at = time.monotonic()
        run.drop_dead()
        return run

    def _new_run(self, name: str) -> _RunRecords:
        path = (
            None if self._folder is None else self._folder / f"{NAMES_PREFIX}{name}{NAMES_SUFFIX}"
        )
        return _RunRecords(self._changes, names=KnownNames(path), names_path=path)


def _remembered_runs(folder: Path) -> list[str]:
    """Return the newest runs whose names a folder keeps, up to the limit. Remove the files of the
    others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = sorted(
        folder.glob(f"{NAMES_PREFIX}*{NAMES_SUFFIX}"), key=lambda path: path.stat().st_mtime
    )
    for path in paths[:-MAX_RUNS]:
        path.unlink()
    return [
        path.name.removeprefix(NAMES_PREFIX).removesuffix(NAMES_SUFFIX)
        for path in paths[-MAX_RUNS:]
    ]


class Rendezvous:
    """A rendezvous that runs in its own thread."""

    def __init__(self, loop: EventLoopThread, messenger: StreamMessenger) -> None:
        self._loop = loop
        self._messenger = messenger
        self.address = f"{SCHEME}{messenger.address}"
        self._is_closed = False

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.try_to(self._messenger.close(), 5)
            self._loop.close()


def serve_rendezvous(
    host: str, port: int, run_key: RunKey | None = None, folder: Path | None = None
) -> Rendezvous:
    """Start a rendezvous (port 0: any free one). With a key it answers only holders of the key.
    Raises InputError.

    In `folder` it keeps the owners of the runs' names.
    """
    loop = EventLoopThread()
    try:
        opened = _open(host, port, PeerAuth(run_key, names=None), RecordServer(folder))
        return Rendezvous(loop, loop.run(opened, timeout_seconds=10))
    except BaseException:
        loop.close()
        raise


async def _open(host: str, port: int, auth: PeerAuth, server: RecordServer) -> StreamMessenger:
    messenger = StreamMessenger(RENDEZVOUS, Endpoint(RENDEZVOUS, 0), dial, Traffic(), auth)
    messenger.max_body_bytes = MAX_CALL_BYTES
    for kind, handler in server.handlers.items():
        messenger.serve(kind, handler)
    try:
        return await listen(messenger, host, port)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port"
        ) from None
