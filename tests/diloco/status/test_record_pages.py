"""Pages of an island's records: whole lines, from where the watcher is, of the file that it
knows.
"""

import threading
from pathlib import Path

import pytest

from diloco.records.metrics import Metrics, to_line
from diloco.status.record_pages import (
    CALL,
    LINGER_SECONDS,
    PAGE_BYTES,
    RecordsPage,
    RecordsRequest,
    RecordsServer,
)
from outer.errors import MessageError
from outer.membership.loopback import LoopbackMessenger
from outer.network.event_loop import EventLoopThread
from outer.network.messages import inflate, parse
from outer.transports.loopback import Hub
from tests.diloco.sample_records import a_step
from tests.outer.nets import KINDS, A, B, run, swarm

START = RecordsRequest(journal="", offset=0)


def after(page: RecordsPage) -> RecordsRequest:
    return RecordsRequest(journal=page.journal, offset=page.end)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_a_long_file_are_the_whole_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(to_line(a_step(number)) for number in range(3 * PAGE_BYTES // 250))
    path.write_text(text)

    async def main() -> None:
        async with swarm(kind) as place:
            caller, island = await place.open(A), await place.open(B)
            RecordsServer(path).serve(island.messenger)
            request, told = START, ""
            while len(told) < len(text):
                reply = await caller.messenger.call(
                    island.messenger.address, CALL, request.encode(), timeout_seconds=20
                )
                page = parse(RecordsPage, inflate(reply))
                assert (
                    0 < len(page.lines) <= PAGE_BYTES
                    and page.lines.endswith("\n")
                    and page.size == len(text)
                )
                request, told = after(page), told + page.lines
            assert told == text
            with pytest.raises(MessageError, match="not a RecordsRequest"):
                await caller.messenger.call(
                    island.messenger.address, CALL, b'{"offset": -1}', timeout_seconds=20
                )

    run(main())


def test_a_line_that_is_being_written_is_told_when_it_is_whole(tmp_path: Path) -> None:
    path, line = tmp_path / "metrics.jsonl", to_line(a_step())
    path.write_text(line + line[:20])
    server = RecordsServer(path)
    first = server.read_page(START)
    assert first.lines == line
    path.write_text(line + line)
    assert server.read_page(after(first)).lines == line


def test_a_watcher_that_knows_another_file_gets_this_one_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line(a_step(1)) + to_line(a_step(2)))
    page = RecordsServer(path).read_page(RecordsRequest(journal="ab" * 8, offset=10))
    assert page.lines == path.read_text()


def test_a_damaged_line_longer_than_a_page_is_passed_over(tmp_path: Path) -> None:
    path, line = tmp_path / "metrics.jsonl", to_line(a_step())
    path.write_text(line + "x" * (3 * PAGE_BYTES) + "\n" + line)
    server, request, told = RecordsServer(path), START, ""
    for _ in range(5):
        page = server.read_page(request)
        request, told = after(page), told + page.lines
    assert told.splitlines()[-1] + "\n" == line and page.end == page.size == path.stat().st_size


def test_an_island_without_records_tells_none(tmp_path: Path) -> None:
    assert RecordsServer(tmp_path / "metrics.jsonl").read_page(START) == RecordsPage(
        journal="", end=0, size=0, lines=""
    )


def test_an_island_waits_at_its_end_for_a_watcher_to_have_the_last_records(tmp_path: Path) -> None:
    metrics, hub, loop = Metrics(tmp_path / "metrics.jsonl"), Hub(), EventLoopThread()
    metrics.write(a_step(1))
    server = RecordsServer(metrics.path)

    async def open_messengers() -> tuple[LoopbackMessenger, str]:
        island = LoopbackMessenger(hub, "run", B)
        server.serve(island)
        return LoopbackMessenger(hub, "run", A), island.address

    caller, address = loop.run(open_messengers())

    def ask(request: RecordsRequest) -> RecordsPage:
        return parse(
            RecordsPage,
            inflate(loop.run(caller.call(address, CALL, request.encode(), timeout_seconds=5))),
        )

    page = ask(START)
    metrics.write(a_step(2))
    waits = threading.Thread(target=server.linger, args=[loop])
    waits.start()
    waits.join(LINGER_SECONDS / 10)
    assert waits.is_alive()
    assert '"step": 2' in ask(after(page)).lines
    waits.join(LINGER_SECONDS)
    assert not waits.is_alive()
    loop.close()


def test_an_island_that_nobody_watches_ends_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(a_step(1))
    waits = threading.Thread(target=RecordsServer(metrics.path).linger, args=[None])
    waits.start()
    waits.join(LINGER_SECONDS / 2)
    assert not waits.is_alive()
