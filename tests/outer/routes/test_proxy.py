"""An island that leaves its network by a proxy: everything that it dials goes through it."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.watchdog.signals import end_with_parent
from outer.errors import InputError
from outer.routes.addresses import Route
from outer.routes.dialer import Dialer
from outer.routes.proxy import parse_proxy
from tests.outer.nets import A, B, connect, run, swarm
from tests.outer.routes.relays import addresses, relays
from tests.outer.routes.test_relay import exchange

ROOT = Path(__file__).parents[3]


@contextmanager
def proxy(login: str = "") -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """A proxy in a process of its own, and its port."""
    command = [
        sys.executable,
        "-m",
        "diloco.network_emulation.proxy",
        "127.0.0.1",
        "0",
        *([login] if login else []),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
    finally:
        process.kill()
        process.wait()


def end_and_read(process: "subprocess.Popen[str]") -> set[str]:
    """The places that a proxy has connected to."""
    process.kill()
    assert process.stdout is not None
    return set(process.stdout.read().split())


@pytest.mark.parametrize("scheme", ["http", "socks5"])
def test_an_island_behind_a_proxy_takes_part_and_dials_nothing_else(scheme: str):
    with proxy("me:se:cret%") as (port, process):
        url = f"{scheme}://me:se%3Acret%25@127.0.0.1:{port}"

        async def main() -> set[str]:
            async with relays() as [relay], swarm("tls") as place:
                a = await place.open(A)
                b = await place.open(B, relays=addresses([relay]), proxy=url)
                await connect({A: a, B: b}, "1")
                await exchange(a, b)
                calls, payloads = (
                    each.rpartition("@")[2] for each in (a.messenger.address, a.transport.address)
                )
                return {
                    calls,
                    payloads,
                    *addresses([relay]),
                    place.bootstrap[0].removeprefix("tcp://"),
                }

        dialled = run(main())
        assert end_and_read(process) == dialled


@pytest.mark.parametrize("scheme", ["http", "socks5"])
def test_a_proxy_that_refuses_is_named(scheme: str):
    async def ask(url: str) -> None:
        await Dialer(parse_proxy(url)).connect(Route("127.0.0.1", 1))

    with (
        proxy() as (port, _),
        pytest.raises(
            ConnectionRefusedError, match=rf"the proxy 127\.0\.0\.1:{port}: .*(502|refuses)"
        ),
    ):
        asyncio.run(ask(f"{scheme}://127.0.0.1:{port}"))
    with (
        proxy("me:right") as (port, _),
        pytest.raises(ConnectionRefusedError, match=r"407|name and password"),
    ):
        asyncio.run(ask(f"{scheme}://me:wrong@127.0.0.1:{port}"))


def test_bytes_that_are_no_proxys_answer_are_refused():
    async def ask(scheme: str, said: bytes) -> None:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            writer.write_eof()

        server = await asyncio.start_server(say, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            with pytest.raises(ConnectionRefusedError, match="the proxy"):
                await asyncio.wait_for(
                    Dialer(parse_proxy(f"{scheme}://127.0.0.1:{port}")).connect(Route("x", 1)), 5
                )
        finally:
            server.close()

    for said in (b"", b"SSH-2.0-x\r\n\r\n", b"\x04\x00", b"\r\n\r\n", b"x" * (1 << 15)):
        for scheme in ("http", "socks5"):
            run(ask(scheme, said))


@pytest.mark.parametrize(
    "url", ["", "proxy:1", "https://h:1", "http://h", "http://h:x", "http://h:1/path", "http://:1"]
)
def test_a_url_that_names_no_proxy_is_refused_without_its_password(url: str):
    with pytest.raises(InputError, match=r"island\.proxy: got"):
        parse_proxy(url)
    with pytest.raises(InputError) as caught:
        parse_proxy("https://me:secret@h:1")
    assert "secret" not in str(caught.value)
