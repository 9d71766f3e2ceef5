"""A joiner keeps downloaded parts on disk, and fetches only the rest after a restart."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from outer.codecs import build_codec
from outer.codecs.choice import build_uniform_choice
from outer.network.endpoints import Endpoint, Messenger
from outer.transfer.donor import PartRequest
from outer.transfer.download import Download
from outer.transfer.download_plan import DownloadPlan
from tests.outer.donors import (
    DEFAULTS,
    NUM_PARTS,
    PARTS,
    SPACE,
    Run,
    Watched,
    cache_in,
    enter_state,
    files,
    member,
    tcp,
    with_run,
)


def test_a_killed_joiner_takes_only_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # a joiner that gets the donor's address, and is killed by its donor
        try:
            address = os.read(reading, 100).decode()
            asyncio.run(_join_until_killed(address, folder))
        finally:
            os._exit(1)

    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        asked, donor, is_dead = [], island.donors[0], asyncio.Event()

        async def serve_and_kill(source: Endpoint, body: bytes) -> bytes:
            asked.append(source)
            if len(asked) == NUM_PARTS // 2:
                kill(child)
                is_dead.set()
            return await donor._on_request(PartRequest, donor._read_part, source, body)

        island.messengers[0].serve("part", serve_and_kill)
        os.write(writing, island.messengers[0].address.encode())
        await is_dead.wait()
        num_kept = len(files(folder, "part-??????"))
        assert num_kept > 0
        watched = Watched(messenger)
        download = here.download(watched, cache=cache_in(folder))
        await enter_state(here, download)
        assert watched.num("part") == NUM_PARTS - num_kept and download.digests() == island.digests

    try:
        with_run(test)
    finally:
        os.close(reading)
        os.close(writing)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


async def _join_until_killed(address: str, folder: Path) -> None:
    plan = DownloadPlan(SPACE, PARTS, build_uniform_choice(build_codec("bf16")), DEFAULTS)
    download = Download(await tcp("joiner"), plan, cache_in(folder))
    download.use_donors([member("a", [address])])
    await download.run(1)


async def fill(here: Run, messenger: Messenger, folder: Path) -> None:
    """Commit on an island, and download its whole state to a joiner's cache."""
    await here.enter("a")
    here.commit()
    await here.download(messenger, cache=cache_in(folder)).run(1)
    assert len(files(folder)) == NUM_PARTS


def damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    match how:
        case "cut":
            raw = raw[:-5]
        case "flipped":
            raw[-9] ^= 1
        case "renumbered":
            raw = raw.replace(b'"round":1', b'"round":x')
        case "another part":
            raw = bytearray(path.with_name("part-000007").read_bytes())
        case "empty":
            raw = bytearray()
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["cut", "flipped", "renumbered", "another part", "empty"])
def test_a_damaged_part_on_disk_is_taken_anew(tmp_path: Path, how: str) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await fill(here, messenger, tmp_path)
        damage(tmp_path / "part-000003", how)
        watched = Watched(messenger)
        await enter_state(here, here.download(watched, cache=cache_in(tmp_path)))
        assert watched.num("part") == 1

    with_run(test)


@pytest.mark.parametrize("other", [{"run_name": "another"}, {"fingerprint": "f" * 32}])
def test_parts_of_another_run_or_model_are_not_read(tmp_path: Path, other: dict[str, str]) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await fill(here, messenger, tmp_path)
        cache = cache_in(tmp_path, **other)
        assert all(cache.read(part.index, part.num_elements) is None for part in SPACE.parts)

    with_run(test)


def test_parts_on_disk_that_are_too_old_are_brought_up_by_means(tmp_path: Path) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await fill(here, messenger, tmp_path)
        here.commit()
        watched = Watched(messenger)
        assert await here.download(watched, cache=cache_in(tmp_path)).run(2) == 2
        assert (watched.num("part"), watched.num("mean")) == (0, NUM_PARTS)

    with_run(test)


def test_parts_on_disk_beyond_the_donors_round_are_not_used(tmp_path: Path) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        for _ in range(3):
            here.commit()
        await here.download(messenger, cache=cache_in(tmp_path)).run(1)
        again = Run()
        island = await again.enter("b")
        again.commit()
        download = again.download(messenger, cache=cache_in(tmp_path))
        assert await enter_state(again, download) == 1 and download.digests() == island.digests
        await again.close()

    with_run(test)


def test_a_cache_that_is_removed_leaves_nothing(tmp_path: Path) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await fill(here, messenger, tmp_path / "parts")
        cache_in(tmp_path / "parts").remove()
        assert not files(tmp_path)

    with_run(test)


def test_a_joiner_without_room_on_disk_goes_on_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")

    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        here.commit()
        with caplog.at_level(logging.WARNING):
            await enter_state(here, here.download(messenger, cache=cache_in(blocked / "parts")))
        assert [r.name for r in caplog.records] == ["outer.transfer.cache"]

    with_run(test)
