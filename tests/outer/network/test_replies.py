"""What a rank holds of replies: of those that its callers do not take, and of those that come back
to it.
"""

import asyncio

import pytest

from outer.errors import PeerLost
from outer.network import rejections, rpc
from outer.network.endpoints import Endpoint, Kind
from outer.network.frames import Header
from outer.network.handshake import say_hello
from outer.network.rpc import StreamMessenger
from tests.outer.membership.test_membership import wait_for
from tests.outer.nets import KINDS, A, B, run, swarm

MiB = 1 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_that_is_longer_than_the_caller_expects_is_not_taken(kind):
    async def main() -> None:
        async with swarm(kind) as place:
            a, b = await place.open(A), await place.open(B)
            b.messenger.serve("part", send_mebibyte)
            own, address = a.messenger, b.messenger.address
            with pytest.raises(PeerLost):
                await own.call(
                    address, "part", b"", timeout_seconds=10, lane="bulk", longest=MiB - 1
                )
            assert (
                len(
                    await own.call(
                        address, "part", b"", timeout_seconds=10, lane="bulk", longest=MiB
                    )
                )
                == MiB
            )

    run(main())


async def send_mebibyte(source: Endpoint, body: bytes) -> bytes:
    return bytes(MiB)


def test_a_caller_that_does_not_take_its_replies_fills_no_memory_and_others_are_answered(
    monkeypatch,
):
    monkeypatch.setattr(rejections, "MAX_REPLIES_OF_PEER", 4 * MiB)
    made: list[str] = []

    async def part(source: Endpoint, body: bytes) -> bytes:
        made.append(source.island)
        return bytes(MiB)

    async def main() -> None:
        async with swarm("gloo") as place:
            a, b = await place.open(A), await place.open(B)
            b.messenger.serve("part", part)
            thief = (await place.open(Endpoint("thief", 0))).messenger
            assert isinstance(thief, StreamMessenger)
            await thief.call(
                b.messenger.address, "part", b"", timeout_seconds=10
            )  # how long it is, is known now
            streams = [await open_stream(thief, b.messenger.address) for _ in range(4)]
            for number in range(1, 40):
                for stream in streams:
                    await stream.write(Header(Kind.CALL, request=number), b"\4part")
            for _ in range(3):
                assert (
                    len(
                        await a.messenger.call(b.messenger.address, "part", b"", timeout_seconds=10)
                    )
                    == MiB
                )
            # What fits into the sockets has left the process.
            assert made.count("thief") < 4 + 4 * 8
            for stream in streams:
                stream.close()

    run(main())


def test_a_caller_that_takes_nothing_of_its_reply_is_not_answered_any_longer(monkeypatch):
    monkeypatch.setattr(rpc, "STALL_SECONDS", 0.2)

    async def main() -> None:
        async with swarm("gloo") as place:
            b = await place.open(B)
            b.messenger.serve("long", lambda source, body: asyncio.sleep(0, bytes(64 * MiB)))
            thief = (await place.open(Endpoint("thief", 0))).messenger
            assert isinstance(thief, StreamMessenger)
            stream = await open_stream(thief, b.messenger.address)
            await stream.write(Header(Kind.CALL, request=1), b"\4long")
            found: list[str] = []

            async def is_refused() -> bool:
                found.extend(kind for _, kind, *_ in b.rejections.drain())
                return bool(found)

            await wait_for(is_refused, True, seconds=20)
            assert found == ["unread"]

    run(main())


async def open_stream(messenger: StreamMessenger, address: str):
    stream = messenger._stream(*await messenger._dial(address), "")
    await say_hello(stream, Endpoint("thief", 0), messenger.auth)
    return stream
