"""Limits on what a rank holds for its callers."""

import asyncio

import pytest

from outer.network import rejections
from outer.network.rejections import Guests, RefusedError
from tests.outer.nets import run


def test_of_too_many_connections_that_have_not_said_who_they_are_the_oldest_of_the_host_ends():
    guests, ended = Guests(), []
    guests.enter("another", lambda: ended.append("another"))
    first = guests.enter("host", lambda: ended.append("first"))
    for number in range(1, rejections.MAX_UNPROVEN_OF_HOST):
        guests.enter("host", lambda number=number: ended.append(number))
    first.prove("a")
    guests.enter("host")
    assert ended == [], "an island that has said who it is makes room"
    guests.enter("host")
    assert ended == [1]


def test_of_too_many_such_connections_of_all_hosts_one_of_the_host_with_most_ends():
    guests, ended = Guests(), []
    for number in range(rejections.MAX_UNPROVEN - 2):
        guests.enter(f"host {number}", lambda number=number: ended.append(number))
    for name in ("first", "second"):
        guests.enter("crowded", lambda name=name: ended.append(name))
    guests.enter("last")
    assert ended == ["first"]


def test_an_island_at_one_host_has_so_many_connections(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rejections, "MAX_CONNECTIONS_OF_PEER", 2)
    guests = Guests()
    first, second, third = (guests.enter("host") for _ in range(3))
    first.prove("a")
    second.prove("a")
    with pytest.raises(RefusedError, match="more than 2 connections of a at host"):
        third.prove("a")
    third.prove("b")
    for guest in (first, second, third):
        guest.leave()
    assert not guests._proven and not guests._unproven and not guests._of_host, (
        "a stranger's names leave nothing behind"
    )


def test_bodies_of_one_peer_wait_for_each_other_and_not_for_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(rejections, "MAX_HELD_BYTES_OF_PEER", 100)

    async def main() -> None:
        guests = Guests()
        a, b = guests.enter("host"), guests.enter("host")
        a.prove("a")
        b.prove("b")
        first, second, other = a.next_body(), a.next_body(), b.next_body()
        await first.hold(80)
        waiting = asyncio.create_task(second.hold(80))
        await other.hold(80)
        assert not waiting.done()
        first.release()
        first.release()
        await asyncio.wait_for(waiting, 5)
        for body in (second, other):
            body.release()
        assert not guests.bodies.by_peer

    run(main())


def test_bodies_of_all_peers_have_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rejections, "MAX_HELD_BYTES", 100)
    monkeypatch.setattr(rejections, "BODY_SECONDS", 0.1)

    async def main() -> None:
        guests = Guests()
        bodies = []
        for name in ("a", "b"):
            guest = guests.enter("host")
            guest.prove(name)
            bodies.append(guest.next_body())
        await bodies[0].hold(80)
        with pytest.raises(TimeoutError):
            await bodies[1].hold(80)

    run(main())
