"""Messages take the time that the links of both islands need for them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from diloco.network_emulation.links import AccessLink
from diloco.virtual.network import VirtualNetwork
from diloco.virtual.stand_in import StandIn, build_stand_in
from diloco.virtual.world import World
from inner.param_spec import ParamSpec
from outer.config import OuterConfig
from outer.network.endpoints import Lane, Leg, Tag
from outer.transports.loopback import Parcel

SLOW, RTT = AccessLink(rate=8000.0, rtt=0.2), 0.2
"""1000 bytes take a second."""


def arrivals(
    *parcels: Parcel, links: dict[str, AccessLink], stand_in: StandIn | None = None
) -> list[float]:
    """When parcels have arrived that are all sent at time 0."""
    return arrivals_at([(0.0, parcel) for parcel in parcels], links, stand_in)


def arrivals_at(
    sent: Sequence[tuple[float, Parcel]],
    links: dict[str, AccessLink],
    stand_in: StandIn | None = None,
) -> list[float]:
    """When parcels have arrived that are sent at these times."""
    world, times = World(100.0), dict.fromkeys((parcel for _, parcel in sent), 0.0)
    stand_in = stand_in or build_stand_in([ParamSpec("w", (4, 4))], OuterConfig(inner_steps=1), 2)
    network = VirtualNetwork(world, stand_in, links.get, payload_share=1.0)
    for when, parcel in sent:
        arrived = partial(lambda parcel: times.update({parcel: world.now}), parcel)
        world.at(when, partial(network.deliver, parcel, arrived))
    world.run(lambda: all(times.values()))
    return list(times.values())


def message(source: str, to: str, lane: Lane = "control", number: int = 0) -> Parcel:
    return Parcel(source, to, f"{source}{to}{lane}{number}", 1000, lane)


def test_small_messages_of_an_island_leave_one_after_another() -> None:
    parcels = [message("a", to) for to in "bcd"]
    assert arrivals(*parcels, links={"a": SLOW}) == pytest.approx(
        [1 + RTT / 4, 2 + RTT / 4, 3 + RTT / 4]
    )


def test_payloads_to_an_island_leave_one_after_another() -> None:
    parcels = [message("a", "b", "bulk", number) for number in range(3)]
    assert arrivals(*parcels, links={"a": SLOW}) == pytest.approx(
        [1 + RTT / 4, 2 + RTT / 4, 3 + RTT / 4]
    )


def test_payloads_to_different_islands_share_the_uplink() -> None:
    # Two to b and one each to c and d: all three connections have a third of the rate, then b's
    # second has all of it.
    parcels = [message("a", to, "bulk", number) for number, to in enumerate("bbcd")]
    assert arrivals(*parcels, links={"a": SLOW}) == pytest.approx(
        [3 + RTT / 4, 4 + RTT / 4, 3 + RTT / 4, 3 + RTT / 4]
    )


def test_a_payload_that_begins_later_leaves_less_to_the_others() -> None:
    sent = [(0.0, message("a", "b", "bulk")), (0.5, message("a", "c", "bulk"))]
    assert arrivals_at(sent, links={"a": SLOW}) == pytest.approx([1.5 + RTT / 4, 2 + RTT / 4])


def test_nobody_waits_for_a_payload_that_has_not_begun_to_arrive() -> None:
    # a's second payload to d begins after 1 s, and b's first one arrives before it.
    parcels = [
        message("a", "d", "bulk", 0),
        message("a", "d", "bulk", 1),
        message("b", "d", "bulk", 2),
    ]
    links = {"a": SLOW, "d": AccessLink(rate=16000.0)}
    assert arrivals(*parcels, links=links) == pytest.approx([1 + RTT / 4, 2 + RTT / 4, 1.0])


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_messages_to_an_island_arrive_one_after_another(lane: Lane) -> None:
    parcels = [message(source, "d", lane) for source in "abc"]
    assert arrivals(*parcels, links={"d": SLOW}) == pytest.approx(
        [1 + RTT / 4, 2 + RTT / 4, 3 + RTT / 4]
    )


def test_an_exchange_of_all_with_all_takes_what_an_uplink_needs() -> None:
    names = "abcdef"
    parcels = [message(source, to, "bulk") for source in names for to in names if source != to]
    links = dict.fromkeys(names, AccessLink(rate=8000.0))
    assert arrivals(*parcels, links=links) == pytest.approx([5.0] * len(parcels))


def test_a_message_passes_two_links_at_the_pace_of_the_slower_one() -> None:
    half = AccessLink(rate=4000.0)
    assert arrivals(message("a", "b"), links={"a": SLOW, "b": half}) == pytest.approx([2 + RTT / 4])


def test_a_small_message_does_not_wait_for_payloads() -> None:
    parcels = [message("a", "b", "bulk"), message("a", "b", "control")]
    assert arrivals(*parcels, links={"a": SLOW}) == pytest.approx([1 + RTT / 4] * 2)


def test_a_payload_that_stands_for_several_takes_a_share_of_its_reducers_link() -> None:
    stand_in = replace(
        build_stand_in([ParamSpec("w", (4, 4))], OuterConfig(inner_steps=1), 2), share=0.25
    )
    size = stand_in.payload_bytes(Tag(0, 0, Leg.REDUCE, 0))
    to_reducer = Parcel("a", "r", "payload", size, "bulk", Tag(0, 0, Leg.REDUCE, 0))
    of_reducer = Parcel("r", "a", "payload", size, "bulk", Tag(0, 0, Leg.GATHER, 0))

    def seconds(parcel: Parcel, slow: str) -> float:
        return arrivals(parcel, links={slow: SLOW}, stand_in=stand_in)[0] - RTT / 4

    whole = size / 1000
    assert (seconds(to_reducer, "a"), seconds(to_reducer, "r")) == pytest.approx((whole, whole / 4))
    assert (seconds(of_reducer, "a"), seconds(of_reducer, "r")) == pytest.approx((whole, whole / 4))
