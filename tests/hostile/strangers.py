"""What an attacker without the run key does: raw bytes on an island's ports, and records where
everybody may write.
"""

import asyncio
import os
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from diloco.config.schema import Config
from outer.errors import OuterError
from outer.identity.tls import TlsIdentity
from outer.network.endpoints import Kind
from outer.network.frames import HEADER_BYTES, Header, hash_names, pack_header
from outer.packages import has_hivemind
from outer.routes.addresses import parse_island_address
from outer.routes.dialer import dial
from tests.hostile.scene import HONEST, note_begin, targets
from tests.swarm import Work

if has_hivemind():
    from hivemind.utils.timed_storage import get_dht_time

    from outer.membership.dht.node import open_dht
    from outer.membership.dht.records import store_config, store_record
    from outer.transports.hivemind_addresses import parse_address
    from outer.transports.hivemind_daemon import Daemon, DaemonSettings, start_daemon, stream_name

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Opener = Callable[[str], Awaitable[Pair]]
"""Opens a raw stream to an island's calls at a control address. Raises OuterError."""


@asynccontextmanager
async def openers(
    config: Config, purposes: tuple[str, ...] = ("control",)
) -> AsyncIterator[list[Opener]]:
    """One opener for each purpose of streams; over tls before and within TLS. Over gloo only calls
    have streams.
    """
    if config.outer.network.meets_at == "rendezvous":
        yield [dial] if config.outer.transport == "gloo" else [dial, dial_within_tls]
        return
    daemon = await stranger_daemon(config)

    def opener(purpose: str) -> Opener:
        return lambda target: daemon.open_stream(
            parse_address(target), stream_name(config.name, purpose, 0)
        )  # pyright: ignore

    try:
        yield [opener(purpose) for purpose in purposes]
    finally:
        await daemon.close()


async def dial_within_tls(target: str) -> Pair:
    host, port = parse_island_address(target).routes[0].place
    return await asyncio.open_connection(host, port, ssl=TlsIdentity().client)


async def stranger_daemon(config: Config) -> "Daemon":
    return await start_daemon(
        DaemonSettings(["/ip4/127.0.0.1/tcp/0"], bootstrap=config.island.bootstrap)
    )


def on_streams(treat: Callable[[Config, Pair], Awaitable[None]], at_once: int) -> Work:
    """The work that opens so many streams to each honest island, treats each, and opens another
    when one has ended.
    """

    async def keep_one(config: Config, open_stream: Opener, target: str) -> None:
        while True:
            with suppress(OuterError, OSError, TimeoutError):
                async with asyncio.timeout(10):
                    pair = await open_stream(target)
                try:
                    await treat(config, pair)
                finally:
                    pair[1].close()
            await asyncio.sleep(0.05)

    async def main(config: Config) -> None:
        async with openers(config, ("control", "bulk")) as made, asyncio.TaskGroup() as tasks:
            note_begin(config)
            for open_stream in made:
                for target in targets(config).values():
                    for _ in range(at_once):
                        tasks.create_task(keep_one(config, open_stream, target))

    return lambda config, index: asyncio.run(main(config))


async def garbage(config: Config, pair: Pair) -> None:
    """Random bytes, or a header that is right but for one byte."""
    header = bytearray(
        pack_header(Header(Kind.HELLO, num_bytes=100), hash_names(config.name, "control"))
    )
    header[random.randrange(HEADER_BYTES)] ^= 1 << random.randrange(8)
    pair[1].write(
        random.choice([os.urandom(random.randrange(1, 5000)), bytes(header) + os.urandom(200)])
    )
    await pair[1].drain()
    await _until_closed(pair)


async def long_frames(config: Config, pair: Pair) -> None:
    """A first frame of 127 MB, of which as much is sent as is taken."""
    for kind in (Kind.HELLO, Kind.CALL, Kind.PAYLOAD):
        pair[1].write(
            pack_header(Header(kind, num_bytes=127 << 20), hash_names(config.name, "control"))
        )
    for _ in range(127):
        pair[1].write(bytes(1 << 20))
        await pair[1].drain()


async def half_handshakes(config: Config, pair: Pair) -> None:
    """The header of a hello, and then a byte from time to time."""
    pair[1].write(
        pack_header(Header(Kind.HELLO, num_bytes=900), hash_names(config.name, "control"))
    )
    while not pair[0].at_eof():
        pair[1].write(b"{")
        await pair[1].drain()
        await asyncio.sleep(0.5)


async def silence(config: Config, pair: Pair) -> None:
    await _until_closed(pair)


async def _until_closed(pair: Pair) -> None:
    async with asyncio.timeout(30):
        while await pair[0].read(1 << 16):
            pass


def vandalises_the_dht(config: Config, index: int) -> None:
    """Store records, configs and long values under the run's keys."""

    async def main() -> None:
        daemon = await stranger_daemon(config)
        dht = await open_dht(daemon, config.island.bootstrap, 20)
        note_begin(config)
        auth = daemon.auth  # it has a key of its own, and no run key
        while True:
            later = get_dht_time() + 250
            for name in HONEST:
                await store_record(dht, config.name, auth, name, secrets.token_bytes(1000), later)
            await store_config(dht, config.name, auth, "name: other\n", later)
            for number in range(20):
                await dht.store(
                    f"{config.name}/members",
                    secrets.token_bytes(1 << 19),
                    later,
                    subkey=f"x{number}",
                )
                await store_record(dht, config.name, auth, f"x{number}", bytes(100_000), later)
                await store_record(
                    dht, f"run-{secrets.token_hex(4)}", auth, "x", bytes(100_000), later
                )

    asyncio.run(main())
