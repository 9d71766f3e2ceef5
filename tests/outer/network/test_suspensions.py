"""Whoever sends malformed messages is no longer heard after a few, by key, and nobody else is."""

import pytest

from outer.errors import MessageError, PeerLost
from outer.gossip.server import Tell, TellReply
from outer.network.endpoints import Endpoint
from outer.network.messages import call_message, receive
from outer.network.rejections import MAX_MALFORMED, SUSPENDED_SECONDS, Suspensions
from tests.outer.nets import A, B, C, run, swarm

NETWORKS = pytest.mark.parametrize("kind", ["gloo", "tls", "hivemind"])
GOOD, WRONG = Tell(round=1, has_all=True).encode(), b'{"round": [[], []], "more": 1}'


async def on_tell(source: Endpoint, body: bytes) -> bytes:
    await receive(Tell, body)
    return TellReply(status="yes").encode()


@NETWORKS
def test_a_caller_is_closed_and_refused_by_its_key_after_a_few_malformed_messages(
    kind: str,
) -> None:
    async def main() -> None:
        async with swarm(kind) as place:
            wrong, island, honest = [(await place.open(each)).messenger for each in (A, B, C)]
            island.serve("tell", on_tell)
            assert await wrong.call(island.address, "tell", GOOD, timeout_seconds=10)
            for _ in range(MAX_MALFORMED):
                with pytest.raises((MessageError, PeerLost)):
                    await wrong.call(island.address, "tell", WRONG, timeout_seconds=10)
            for _ in range(2):
                with pytest.raises(PeerLost):
                    await wrong.call(island.address, "tell", GOOD, timeout_seconds=10)
            assert island.auth.suspensions.seconds_left(wrong.auth.island.public) > 0
            assert await honest.call(island.address, "tell", GOOD, timeout_seconds=10)
            with pytest.raises(PeerLost):
                await island.call(wrong.address, "tell", GOOD, timeout_seconds=10)

    run(main())


@NETWORKS
def test_an_island_that_answers_malformed_replies_is_called_no_more(kind: str) -> None:
    async def on_wrongly(source: Endpoint, body: bytes) -> bytes:
        return WRONG

    async def main() -> None:
        async with swarm(kind) as place:
            wrong, island = [(await place.open(each)).messenger for each in (A, B)]
            wrong.serve("tell", on_wrongly)
            tell = Tell(round=1, has_all=True)
            for _ in range(MAX_MALFORMED):
                with pytest.raises(MessageError, match="a TellReply"):
                    await call_message(
                        island, wrong.address, "tell", tell, TellReply, timeout_seconds=10
                    )
            with pytest.raises(PeerLost):
                await call_message(
                    island, wrong.address, "tell", tell, TellReply, timeout_seconds=10
                )

    run(main())


def test_a_refusal_is_no_malformed_message() -> None:
    async def main() -> None:
        async with swarm("tls") as place:
            caller, island = [(await place.open(each)).messenger for each in (A, B)]
            for _ in range(2 * MAX_MALFORMED):
                with pytest.raises(MessageError, match="nothing here answers"):
                    await caller.call(island.address, "tell", GOOD, timeout_seconds=10)

    run(main())


def test_a_suspension_ends_and_messages_far_apart_do_not_begin_one() -> None:
    now = 0.0
    suspensions = Suspensions(clock=lambda: now)
    assert [suspensions.add("key") for _ in range(MAX_MALFORMED)] == [False] * (
        MAX_MALFORMED - 1
    ) + [True]
    assert (
        suspensions.seconds_left("key") == SUSPENDED_SECONDS
        and suspensions.seconds_left("other") == 0
    )
    now = SUSPENDED_SECONDS
    assert suspensions.seconds_left("key") == 0
    for _ in range(2 * MAX_MALFORMED):
        now += SUSPENDED_SECONDS
        assert not suspensions.add("other")
