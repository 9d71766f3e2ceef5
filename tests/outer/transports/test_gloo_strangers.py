"""What strangers and members find where gloo listens: no store, a closed door, and checks before
native code.
"""

import asyncio
import logging
import socket
from functools import cache

import pytest

from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.errors import DeadlineError, InputError, MessageError, PeerLost
from outer.network.endpoints import Endpoint
from outer.transports.gloo.addresses import (
    AddressExchange,
    AddressStore,
    GlooAddress,
    check_gloo_address,
)
from outer.transports.gloo.door import _listeners, _warn_of_open_door, drop_all
from outer.transports.gloo.groups import GroupSpec, _build
from tests.outer.nets import A, B, connect, payload, run, swarm, tag


def ports() -> dict[int, socket.socket]:
    """This process's listening sockets, by port."""
    return {listener.getsockname()[1]: listener for listener in _listeners()}


async def is_open(port: int) -> bool:
    try:
        async with asyncio.timeout(0.5):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


@cache
def may_close_ports() -> bool:
    """Whether this user may close a port here. Some kernels let only root do it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        try:
            drop_all(listener)
        except PermissionError:
            return False
    return True


@pytest.mark.skipif(may_close_ports(), reason="this user may close ports here")
def test_where_a_port_cannot_be_closed_a_group_is_built_with_a_warning(
    caplog: pytest.LogCaptureFixture,
):
    async def main() -> None:
        async with swarm("gloo") as place:
            a, b = await place.connect(A, B)
            _, got = await asyncio.gather(
                a.transport.send(B, tag(0), payload(9)), b.transport.recv(A, tag(0), 9)
            )
            assert got.equal(payload(9))

    _warn_of_open_door.cache_clear()
    with caplog.at_level(logging.WARNING):
        run(main())
    assert (
        "port stays open to anyone who reaches it, because this system lets only root close it"
        in caplog.text
    )


@pytest.mark.skipif(not may_close_ports(), reason="this system lets only root close a port")
def test_once_a_group_is_built_no_port_of_gloo_takes_a_stranger():
    async def main() -> None:
        before = ports().keys()
        async with swarm("gloo") as place:
            a, b = await place.open(A), await place.open(B)
            ours = ports().keys() - before
            await connect({A: a, B: b}, "1")
            of_gloo = ports().keys() - before - ours
            assert len(of_gloo) == 2, "one for each endpoint, and none for a store"
            assert not any([await is_open(port) for port in of_gloo])
            _, got = await asyncio.gather(
                a.transport.send(B, tag(0), payload(9)), b.transport.recv(A, tag(0), 9)
            )
            assert got.equal(payload(9)), "the pairs that are connected go on"

    run(main())


def test_an_endpoint_listens_for_groups_where_its_messenger_does():
    async def main() -> None:
        before = ports().keys()
        async with swarm("gloo") as place:
            a = await place.open(A)
            host, port = a.messenger.address.split(":")
            assert a.transport.address == f"gloo:a/0@{host}:{port}"
            rendezvous = int(place.bootstrap[0].rpartition(":")[2])
            assert ports().keys() - before - {rendezvous} == {int(port)}

    run(main())


OWN = bytes([2, *bytes(7)]) + b"vm" + bytes([136, *bytes(7)]) + bytes(136) + bytes(16)


@pytest.mark.parametrize(
    "theirs",
    [
        b"",
        OWN[:-1],
        OWN + bytes(8),
        bytes(len(OWN)),
        b"\xff" * 170,
        OWN + bytes(1 << 20),
        b"\0\0\0\0\0\1" + OWN[6:],
    ],
)
def test_an_address_that_gloo_must_not_read_is_refused(theirs: bytes):
    with pytest.raises(MessageError, match="address of gloo"):
        check_gloo_address(theirs, OWN, 2)


@pytest.mark.parametrize("host", [b"a", b"a-longer-name.example"])
def test_an_address_of_the_same_form_is_taken(host: bytes):
    check_gloo_address(len(host).to_bytes(8, "little") + host + OWN[10:], OWN, 2)


@pytest.mark.parametrize("size", [1 << 40, (1 << 63) - 1], ids=["too-much-memory", "impossible"])
def test_whatever_gloo_throws_is_an_error_of_the_attempt(size: int):
    store = AddressStore(2, lambda key, value: None)
    store.put("0/1", size.to_bytes(8, "little") + bytes(162))
    spec = GroupSpec("1", A, {A: ("127.0.0.1", 1), B: ("127.0.0.1", 2)}, "127.0.0.1", seconds=2)
    with pytest.raises(DeadlineError, match="the group '1' was not built"):
        _build(spec, store)


def test_a_member_with_a_malformed_address_is_lost_by_name():
    async def main() -> None:
        async with swarm("gloo", connect_seconds=30) as place:
            a, b = await place.open(A), await place.open(B)

            async def lie(source: Endpoint, body: bytes) -> bytes:
                return GlooAddress(key="0/1", value="00").encode()

            b.messenger.serve("gloo_address", lie)
            with pytest.raises(PeerLost, match="b/0: an address of gloo of 1 bytes") as caught:
                await a.transport.connect("1", {A: a.transport.address, B: b.transport.address})
            assert caught.value.peer == "b"

    run(main())


def test_a_caller_that_asks_about_a_newer_group_gives_up_its_older_questions():
    async def main() -> None:
        async with swarm("gloo") as place:
            a, b = await place.open(A), await place.open(B)
            exchange = AddressExchange(a.messenger)
            questions = [
                asyncio.create_task(exchange.ask(b.messenger.address, str(n), 30))
                for n in range(1, 81)
            ]
            results = []
            for question in asyncio.as_completed(questions):
                with pytest.raises(MessageError, match="has not joined the group"):
                    await question
                results.append(question)
                if len(results) == len(questions) - 1:
                    break
            (held,) = [question for question in questions if not question.done()]
            held.cancel()

    run(main())


@pytest.mark.parametrize("key", ["listen_host", "announce_host"])
def test_gloo_on_an_address_of_the_open_internet_needs_an_explicit_yes(key: str):
    async def opened(**own: object) -> None:
        settings = {
            "listen_host": "127.0.0.1",
            "bootstrap": ["tcp://127.0.0.1:1"],
            "connect_seconds": 0.2,
            **own,
        }
        await (await open_network("gloo", NetworkSettings("run", "a", 0, **settings))).close()  # pyright: ignore[reportArgumentType]

    with pytest.raises(
        InputError, match=rf"island\.{key}: got '8\.8\.8\.8', an address of the open internet"
    ):
        run(opened(**{key: "8.8.8.8"}))
    with pytest.raises(InputError, match=r"cannot listen on 8\.8\.8\.8|did not answer within"):
        run(opened(**{key: "8.8.8.8"}, gloo_in_public=True))
