"""Records and calls between islands and a rendezvous of which one does not keep to the protocol."""

import json

import pytest

from outer.errors import InputError, PeerLost
from outer.membership import rendezvous as limits
from outer.membership.records import Announcement, open_record, sign_record
from outer.membership.tcp import RENDEZVOUS, open_membership
from outer.network.endpoints import Endpoint, Traffic
from outer.network.messages import parse
from outer.network.rpc import StreamMessenger
from outer.routes.dialer import dial
from outer.routes.streams import listen
from tests.outer.nets import A, key_of, member, run
from tests.outer.rendezvous import open_memberships, rendezvous


def test_an_oversized_call_is_not_read():
    async def main() -> None:
        with rendezvous(1) as (server,):
            client = StreamMessenger(RENDEZVOUS, Endpoint("x", 0), dial, Traffic())
            target = server.address.removeprefix("tcp://")
            with pytest.raises(PeerLost):
                await client.call(
                    target, "announce", bytes(limits.MAX_CALL_BYTES), timeout_seconds=10
                )
            assert await client.call(target, "runs", b"", timeout_seconds=10) == b'{"runs":{}}'
            await client.close()

    run(main())


def test_records_of_a_hostile_rendezvous_are_checked():
    good = member("a")
    records = {
        "a": sign_record(key_of("a"), "run", good, 1).model_dump(),
        "b": sign_record(key_of("a"), "run", good, 1).model_dump(),
        "c": {"text": "{}", "time": 1, "signature": "0" * 128},
        "d": sign_record(key_of("d"), "another", member("d"), 1).model_dump(),
        "e": sign_record(key_of("a"), "run", member("e"), 1).model_dump(),
        "f": sign_record(key_of("f"), "run", member("f"), 1).model_dump() | {"time": 2},
    }

    async def members(source: Endpoint, body: bytes) -> bytes:
        return json.dumps(
            {"server": "0", "version": 1, "records": records, "is_whole": True, "has_config": False}
        ).encode()

    async def main() -> None:
        messenger = StreamMessenger(RENDEZVOUS, Endpoint("x", 0), dial, Traffic())
        messenger.serve("members", members)
        server = await listen(messenger, "127.0.0.1", 0)
        async with open_memberships(("z", [f"tcp://{server.address}"])) as (z,):
            assert await z.members() == {"a": good}
        await server.close()

    run(main())


def test_a_rendezvous_that_answers_nonsense_is_as_good_as_none():
    async def members(source: Endpoint, body: bytes) -> bytes:
        return (
            b'{"server": "0", "version": 1, "records": {"a b": "x"}, "is_whole": true, '
            b'"has_config": false}'
        )

    async def main() -> None:
        messenger = StreamMessenger(RENDEZVOUS, Endpoint("x", 0), dial, Traffic())
        messenger.serve("members", members)
        server = await listen(messenger, "127.0.0.1", 0)
        with pytest.raises(InputError, match="not a Records"):
            await open_membership([f"tcp://{server.address}"], "run", A, 1, connect_seconds=0.5)
        await server.close()

    run(main())


def test_an_announcement_is_the_same_after_the_wire():
    whole = Announcement(
        run="run", record=sign_record(key_of("a"), "run", member("a"), 5), life_seconds=5.0
    )
    assert parse(Announcement, whole.model_dump_json().encode()) == whole
    assert open_record("run", whole.record) == member("a")
