"""What strangers send does not fill the memory of an island, whether its run has a key or not."""

import asyncio
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outer.errors import PeerLost
from outer.membership.rendezvous import serve_rendezvous
from outer.network import rpc
from outer.network.endpoints import Endpoint, Traffic
from outer.network.rejections import MAX_UNPROVEN_OF_HOST
from outer.network.rpc import HELLO_SECONDS, StreamMessenger
from outer.network.run_key import load_run_key
from outer.routes.dialer import dial
from tests.hostile.flood import connections
from tests.hostile.victim import Victim, victim

MiB = 1 << 20


@pytest.fixture(params=[False, True], ids=["no-key", "run-key"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path | None]]:
    """The address of a rendezvous and the file of its run key, if it has one."""
    key_file = tmp_path / "key" if request.param else None
    if key_file is not None:
        key_file.write_text(secrets.token_hex(32))
        key_file.chmod(0o600)
    server = serve_rendezvous("127.0.0.1", 0, load_run_key(str(key_file) if key_file else None))
    yield server.address, key_file
    server.close()


def grown(of: Victim, before: int) -> int:
    assert not of.has_ended
    return (of.peak_bytes - before) // MiB


def test_connections_that_do_not_say_who_they_are_are_few(place: tuple[str, Path | None]):
    with victim("gloo", *place) as target, connections(target.port, 400) as links:
        assert wait_for(lambda: len(alive(links)) <= MAX_UNPROVEN_OF_HOST)


def alive(links: list[socket.socket]) -> list[socket.socket]:
    """The connections that the other side has not closed."""
    ended, _, _ = select.select(links, [], [], 0)
    return [link for link in links if link not in ended]


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether the condition becomes true within the time in which a hello must come."""
    deadline = time.monotonic() + HELLO_SECONDS / 2
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


async def call_as_strangers(
    target: Victim, names: list[str], body: bytes, seconds: float
) -> list[bytes | BaseException]:
    """Call the victim in several names at once, four times in each, and return replies and
    errors.
    """
    strangers = [StreamMessenger("run", Endpoint(name, 0), dial, Traffic()) for name in names]
    calls = [
        s.call(target.control, "hold", body, timeout_seconds=seconds)
        for s in strangers
        for _ in range(4)
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.gather(*(stranger.close() for stranger in strangers))
    return list(results)


def test_a_call_that_is_too_long_is_not_read(
    place: tuple[str, Path | None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        rpc, "MAX_CALL_BYTES", 1 << 27
    )  # the stranger's own limit; the victim is another process
    with victim("gloo", *place) as target:
        before = target.peak_bytes
        results = asyncio.run(call_as_strangers(target, ["s"], bytes(120 * MiB), 30))
        assert all(isinstance(result, PeerLost) for result in results)
        assert grown(target, before) < 32


@pytest.mark.slow
def test_calls_of_strangers_fill_no_more_than_the_limit(place: tuple[str, Path | None]):
    with victim("gloo", *place) as target:
        before = target.peak_bytes
        names = [f"s{number}" for number in range(12)]
        asyncio.run(call_as_strangers(target, names, bytes(rpc.MAX_CALL_BYTES - 64), 20))
        limit = (
            32 if place[1] is not None else 400
        )  # without a key anybody may call: 256 MiB of bodies, and copies
        assert grown(target, before) < limit
