"""The records that a rendezvous keeps: what it refuses, and how much it takes."""

import asyncio
import json
from typing import Any

import pytest

from outer.errors import InputError, MessageError
from outer.membership import rendezvous as limits
from outer.membership.records import (
    Announcement,
    Publication,
    Records,
    RunQuery,
    sign_record,
    sign_withdrawal,
)
from outer.membership.rendezvous import MAX_RUNS, RecordServer
from outer.network.endpoints import Endpoint
from outer.network.messages import parse
from tests.outer.nets import key_of, member, run


async def ask(server: RecordServer, kind: str, body: bytes) -> bytes:
    return await server.handlers[kind](Endpoint("x", 0), body)


def announcement(name: str, run_id: str = "run", time_ms: int = 1, **changes: Any) -> bytes:
    """An island's announcement, signed with the key that it claims or, with `signed_by`, with that
    of another.
    """
    signed_by = changes.pop("signed_by", name)
    record = sign_record(key_of(signed_by), run_id, member(name, **changes), time_ms)
    return Announcement(run=run_id, record=record, life_seconds=60).encode()


def make_record(**fields: Any) -> bytes:
    return json.dumps(json.loads(announcement("a")) | fields).encode()


MALFORMED = [
    ("announce", b""),
    ("announce", b"\xff\xfe"),
    ("announce", b"[" * 100_000),
    ("announce", make_record(run="../etc")),
    ("announce", make_record(run="x" * 65)),
    ("announce", make_record(life_seconds=1e9)),
    ("announce", make_record(life_seconds=0)),
    ("announce", make_record(life_seconds="NaN")),
    ("announce", make_record(extra=1)),
    ("beat", make_record(record={"text": "{}", "time": 1, "signature": "0" * 128})),
    ("beat", announcement("a", signed_by="b")),
    ("members", b'{"run": 1}'),
    ("members", b'{"run": "run", "seen": -1}'),
    ("members", b'{"run": "run", "server": "not hex"}'),
    ("publish", json.dumps({"run": "run", "text": "x" * (1 << 16) + "x"}).encode()),
    ("publish", json.dumps({"run": "run", "text": "\u20ac" * (1 << 15)}).encode()),
    ("leave", b'{"run": "run", "island": "a b", "incarnation": "00"}'),
    ("config", b"null"),
]


@pytest.mark.parametrize(("kind", "body"), MALFORMED, ids=[f"{k}-{b[:20]!r}" for k, b in MALFORMED])
def test_a_malformed_call_is_refused_and_leaves_nothing_behind(kind, body):
    async def main() -> None:
        server = RecordServer()
        with pytest.raises((MessageError, InputError)):
            await ask(server, kind, body)
        assert not server._runs

    run(main())


def test_a_run_takes_so_many_records_and_no_more():
    async def main() -> None:
        server = RecordServer()
        for number in range(limits.MAX_RECORDS):
            await ask(server, "announce", announcement(f"island-{number}"))
        with pytest.raises(MessageError, match="takes"):
            await ask(server, "announce", announcement("one-more"))
        await ask(server, "beat", announcement("island-3", time_ms=2, round=5))
        await ask(server, "announce", announcement("one-more", run_id="another"))

    run(main())


def test_a_run_takes_so_many_bytes_and_no_more(monkeypatch):
    monkeypatch.setattr(limits, "MAX_RUN_BYTES", 4096)

    async def main() -> None:
        server = RecordServer()
        await ask(server, "announce", announcement("a", control_addresses=["x" * 2000]))
        with pytest.raises(MessageError, match="4096 per run"):
            await ask(server, "announce", announcement("b", control_addresses=["x" * 2000]))
        await ask(
            server, "announce", announcement("a", time_ms=2, control_addresses=["x" * 1500] * 2)
        )

    run(main())


def test_a_rendezvous_serves_so_many_live_runs_and_forgets_the_dead_first():
    async def main() -> None:
        server = RecordServer()
        for number in range(MAX_RUNS):
            publication = Publication(run=f"run-{number}", text="text")
            await ask(server, "publish", publication.model_dump_json().encode())
            if number != 5:
                await ask(server, "announce", announcement("a", run_id=f"run-{number}"))
        await ask(server, "announce", announcement("a", run_id="one-more"))
        assert "run-5" not in server._runs
        with pytest.raises(MessageError, match=f"serves {MAX_RUNS} runs already"):
            await ask(server, "announce", announcement("a", run_id="two-more"))

    run(main())


async def look(server: RecordServer, last: Records | None = None) -> Records:
    """Ask for the records, or for what has changed since the `last` answer."""
    query = (
        RunQuery(run="run")
        if last is None
        else RunQuery(run="run", server=last.server, seen=last.version)
    )
    return parse(Records, await ask(server, "members", query.encode()))


def names(records: Records) -> tuple[list[str], list[str], bool]:
    return sorted(records.records), records.gone, records.is_whole


def test_who_knows_the_records_gets_what_has_changed_and_nothing_else(monkeypatch):
    monkeypatch.setattr(limits, "HOLD_SECONDS", 0.01)

    async def main() -> None:
        server = RecordServer()
        assert names(nobody := await look(server)) == ([], [], True)
        assert names(await look(server, nobody)) == ([], [], False)
        for island in "abc":
            await ask(server, "announce", announcement(island))
        assert names(first := await look(server, nobody)) == (["a", "b", "c"], [], True)
        await ask(server, "beat", announcement("a", time_ms=2))
        assert names(same := await look(server, first)) == ([], [], False)
        await ask(server, "beat", announcement("b", time_ms=2, round=5))
        await ask(server, "leave", sign_withdrawal(key_of("c"), "run", member("c"), 3).encode())
        assert names(second := await look(server, same)) == (["b"], ["c"], False)
        await ask(server, "announce", announcement("c", time_ms=4))
        assert names(await look(server, second)) == (["c"], [], False)
        assert names(await look(server, first)) == (["b", "c"], [], False)

    run(main())


def test_who_has_missed_more_than_is_remembered_or_knows_another_process_gets_all(monkeypatch):
    monkeypatch.setattr(limits, "HOLD_SECONDS", 0.01)
    monkeypatch.setattr(limits, "MAX_RECORDS", 3)

    async def main() -> None:
        server = RecordServer()
        await ask(server, "announce", announcement("a"))
        first = await look(server)
        for number in range(4):
            name = f"island-{number}"
            await ask(server, "announce", announcement(name))
            await ask(
                server, "leave", sign_withdrawal(key_of(name), "run", member(name), 3).encode()
            )
        assert names(await look(server, first)) == (["a"], [], True)
        other = RecordServer()
        await ask(other, "announce", announcement("b"))
        assert names(await look(other, first)) == (["b"], [], True)

    run(main())


def test_a_record_that_is_not_renewed_is_gone(monkeypatch):
    monkeypatch.setattr(limits, "HOLD_SECONDS", 0.5)

    async def main() -> None:
        server = RecordServer()
        short = parse(Announcement, announcement("a")).model_copy(update={"life_seconds": 0.05})
        await ask(server, "announce", short.encode())
        first = await look(server)
        await asyncio.sleep(0.1)
        assert names(await look(server, first)) == ([], ["a"], False)

    run(main())


def test_a_rendezvous_with_a_folder_remembers_after_a_restart_whom_a_name_belongs_to(tmp_path):
    async def main() -> None:
        await ask(RecordServer(tmp_path), "announce", announcement("a"))
        theft = announcement("a", identity=key_of("thief").public, signed_by="thief", time_ms=2)
        with pytest.raises(MessageError, match="belongs to its key"):
            await ask(RecordServer(tmp_path), "announce", theft)
        await ask(RecordServer(tmp_path), "announce", announcement("a", time_ms=2))
        await ask(RecordServer(), "announce", theft)

    run(main())


def test_a_rendezvous_keeps_the_files_of_few_runs(tmp_path):
    async def main() -> None:
        for number in range(MAX_RUNS + 8):
            (tmp_path / f"names-old-{number}.json").write_text("{}")
        server = RecordServer(tmp_path)
        for number in range(MAX_RUNS):
            await ask(server, "announce", announcement("a", run_id=f"new-{number}"))
        with pytest.raises(MessageError, match="serves 32 runs"):
            await ask(server, "announce", announcement("a", run_id="one-more"))
        assert sorted(tmp_path.iterdir()) == sorted(tmp_path.glob("names-new-*.json"))

    run(main())
