"""Messages take the time that the links of both islands need for them."""

import pytest

from diloco.network_emulation.links import AccessLink
from diloco.virtual.network import VirtualNetwork
from diloco.virtual.stand_in import build_stand_in
from diloco.virtual.world import World
from inner.param_spec import ParamSpec
from outer.config import OuterConfig
from outer.network.endpoints import Lane
from outer.transports.loopback import Parcel

SLOW, RTT = AccessLink(rate=8000.0, rtt=0.2), 0.2
"""1000 bytes take a second."""


def arrivals(*parcels: Parcel, links: dict[str, AccessLink]) -> list[float]:
    """When parcels have arrived that are all sent at time 0."""
    world, times = World(100.0), dict.fromkeys(parcels, 0.0)
    stand_in = build_stand_in([ParamSpec("w", (4, 4))], OuterConfig(inner_steps=1), 2)
    network = VirtualNetwork(world, stand_in, links.get, payload_share=1.0)
    for parcel in parcels:
        network.deliver(parcel, lambda parcel=parcel: times.update({parcel: world.now}))
    world.run(lambda: all(times.values()))
    return list(times.values())


def message(source: str, to: str, lane: Lane = "control") -> Parcel:
    return Parcel(source, to, f"{source}{to}{lane}", 1000, lane)


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_messages_of_an_island_leave_one_after_another(lane: Lane) -> None:
    parcels = [message("a", to, lane) for to in "bcd"]
    assert arrivals(*parcels, links={"a": SLOW}) == pytest.approx([1 + RTT / 4, 2 + RTT / 4, 3 + RTT / 4])


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_messages_to_an_island_arrive_one_after_another(lane: Lane) -> None:
    parcels = [message(source, "d", lane) for source in "abc"]
    assert arrivals(*parcels, links={"d": SLOW}) == pytest.approx([1 + RTT / 4, 2 + RTT / 4, 3 + RTT / 4])


def test_a_message_passes_two_links_at_the_pace_of_the_slower_one() -> None:
    half = AccessLink(rate=4000.0)
    assert arrivals(message("a", "b"), links={"a": SLOW, "b": half}) == pytest.approx([2 + RTT / 4])


def test_a_small_message_does_not_wait_for_payloads() -> None:
    parcels = [message("a", "b", "bulk"), message("a", "b", "control")]
    assert arrivals(*parcels, links={"a": SLOW}) == pytest.approx([1 + RTT / 4] * 2)
