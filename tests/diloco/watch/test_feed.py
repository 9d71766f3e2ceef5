"""Many pages of a run have one reader, no page holds up the others, and all is well when they have
gone.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import diloco.watch.feed as feeds
from diloco.watch.feed import MAX_STREAMS, MAX_WAITING, Feed
from diloco.watch.view.prediction import RunPrediction
from diloco.watch.view.run_view import RunView, SentRows
from tests.diloco.sample_records import a_round
from tests.diloco.watch.test_watch import write_island


class CountedView(RunView):
    """A run, and how often its records were read."""

    num_reads = 0

    def read(self) -> SentRows:
        self.num_reads += 1
        return super().read()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "UPDATE_SECONDS", 0.01)


def run(folder: Path, test: Callable[[Feed, CountedView], Any]) -> None:
    async def main() -> None:
        view = CountedView(folder)
        async with asyncio.timeout(60):
            await test(Feed(RunPrediction(view)), view)

    asyncio.run(main())


def test_many_pages_have_one_reader_and_each_gets_every_round(tmp_path: Path) -> None:
    metrics, numbers = write_island(tmp_path), range(2, 8)

    async def watch(feed: Feed) -> str:
        text = ""
        async with aclosing(feed.events()) as events:
            async for event in events:
                text += event
                if f"[{numbers[-1]}," in event or f",{numbers[-1]}," in event:
                    return text
        return text

    async def test(feed: Feed, view: CountedView) -> None:
        pages = [asyncio.create_task(watch(feed)) for _ in range(MAX_STREAMS)]
        while len(feed._readers) < MAX_STREAMS:  # noqa: ASYNC110 - a stream sets no event
            await asyncio.sleep(0.01)
        for number in numbers:
            metrics.write(a_round(number))
            await asyncio.sleep(0.05)
        texts = await asyncio.gather(*pages)
        assert all(text.startswith("event: snapshot") for text in texts)
        assert len({text.count("event: more") for text in texts}) == 1
        assert view.num_reads < 64 * len(numbers)

    run(tmp_path, test)
    metrics.close()


def test_of_too_many_pages_the_oldest_end_and_a_new_one_is_told_all(tmp_path: Path) -> None:
    write_island(tmp_path).close()

    async def test(feed: Feed, view: CountedView) -> None:
        unread = [feed.events() for _ in range(4 * MAX_STREAMS)]
        for events in unread:
            await anext(events)
        async with aclosing(feed.events()) as page:
            assert (await anext(page)).startswith("event: snapshot")
            for _ in range(3):
                assert await anext(page)
        with pytest.raises(StopAsyncIteration):
            while True:
                await anext(unread[0])

    run(tmp_path, test)


def test_nothing_is_read_when_nobody_looks_and_again_when_somebody_does(tmp_path: Path) -> None:
    write_island(tmp_path).close()

    async def test(feed: Feed, view: CountedView) -> None:
        for _ in range(2):
            async with aclosing(feed.events()) as page:
                await anext(page)
                assert await anext(page)
            assert feed._reading is not None
            await feed._reading
            before = view.num_reads
            await asyncio.sleep(0.1)
            assert view.num_reads == before

    run(tmp_path, test)


def test_a_page_that_does_not_read_has_its_stream_ended(tmp_path: Path) -> None:
    write_island(tmp_path).close()

    async def test(feed: Feed, view: CountedView) -> None:
        async with aclosing(feed.events()) as page, aclosing(feed.events()) as sleeper:
            await anext(sleeper)
            for _ in range(3 * MAX_WAITING):
                await anext(page)
            assert len(feed._readers) == 1

    run(tmp_path, test)


def test_an_unfinished_line_is_read_within_a_limit_and_those_after_it_are_found(
    tmp_path: Path,
) -> None:
    from diloco.records.growing_file import MAX_LINE_BYTES, PIECE_BYTES, GrowingFile

    path, long = tmp_path / "lines", b"x" * (2 * PIECE_BYTES + MAX_LINE_BYTES)
    file = GrowingFile(path)
    with path.open("wb", buffering=0) as growing:
        growing.write(b"first\nsec")
        assert file.new_lines() == [b"first"]
        growing.write(b"ond\n" + long)
        assert file.new_lines() == [b"second"] and file._offset == len(b"first\nsecond\n" + long)
        growing.write(b"end of it\nthird\n")
        assert file.new_lines() == [b"third"] and file.new_lines() == []
