"""The global params and momentum of a rank: stepped whole, handed over whole, checked on arrival."""

import asyncio

import pytest
import torch

from outer.config import OuterOptimizerConfig
from outer.errors import MessageError, PeerLost
from outer.membership.base import Member
from outer.membership.loopback import LoopbackMessenger
from outer.space import Space
from outer.state import GlobalState, Position, unpack
from outer.transfer import Description, Donor, fetch_state
from outer.transports.base import Endpoint
from outer.transports.loopback import Hub
from tests.outer.islands import Spec

torch.set_num_threads(1)

GUARD_SECONDS = 20.0
SPACE = Space([Spec("w", (30,))], part_elements=7)


def values(seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {part.index: torch.randn(part.num_elements, generator=generator) for part in SPACE.parts}


def stepped(num_rounds: int, config: OuterOptimizerConfig | None = None) -> GlobalState:
    """The state after some rounds of random pseudo-gradients."""
    state = GlobalState(values(0), config or OuterOptimizerConfig())
    for number in range(num_rounds):
        state.commit(values(100 + number), Position(round=number + 1, tokens=10 * (number + 1)))
    return state


def test_a_pseudo_gradient_is_global_minus_local() -> None:
    state, local = stepped(1), values(7)
    found = state.pseudo_grads(local)
    assert all(torch.equal(found[i], state.parts[i] - local[i]) for i in state.parts)


def test_a_commit_moves_params_momentum_and_position() -> None:
    before, after = stepped(1), stepped(2)
    assert after.position == Position(round=2, tokens=20)
    assert all(before.digests()[i] != after.digests()[i] for i in before.parts)


def test_the_digest_covers_the_momentum() -> None:
    state, other = stepped(2), stepped(2)
    position, part = unpack(state.pack(0), SPACE.parts[0].num_elements)
    part.momentum[1] += 1
    other.replace({0: part}, position)
    assert torch.equal(state.parts[0], other.parts[0])
    assert state.digests()[0] != other.digests()[0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_state_handed_over_steps_as_the_donors_does(momentum: float) -> None:
    config = OuterOptimizerConfig(momentum=momentum)
    donor, joiner = stepped(3, config), GlobalState(values(9), config)
    parts = {p.index: unpack(donor.pack(p.index), p.num_elements) for p in SPACE.parts}
    assert {position for position, _ in parts.values()} == {donor.position}
    joiner.replace({i: state for i, (_, state) in parts.items()}, donor.position)
    assert joiner.digests() == donor.digests()
    for state in (donor, joiner):
        state.commit(values(55), Position(round=4, tokens=40))
    assert joiner.digests() == donor.digests() and joiner.position == donor.position


def test_a_replaced_state_does_not_share_memory_with_the_bytes() -> None:
    donor, joiner = stepped(1), stepped(0)
    body = donor.pack(0)
    position, part = unpack(body, SPACE.parts[0].num_elements)
    joiner.replace({0: part}, position)
    part.params.zero_()
    assert torch.equal(joiner.parts[0], donor.parts[0])


def test_a_part_that_is_not_carried_is_refused() -> None:
    with pytest.raises(MessageError, match="part 99 is not carried"):
        stepped(1).pack(99)


HEADER = b'{"round":1,"tokens":5}\n'
BAD_BODIES = {
    "empty": b"",
    "no position": bytes(8 * 2),
    "too short": HEADER + bytes(8 * 2 - 1),
    "too long": HEADER + bytes(8 * 2 + 1),
    "a position that is none": b'{"round":1}\n' + bytes(8 * 2),
    "a negative round": b'{"round":-1,"tokens":5}\n' + bytes(8 * 2),
    "inf": HEADER + torch.tensor([1.0, torch.inf, 0.0, 0.0]).numpy().tobytes(),
    "nan momentum": HEADER + torch.tensor([1.0, 1.0, 0.0, torch.nan]).numpy().tobytes(),
}


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_malformed_state_is_refused(kind: str) -> None:
    with pytest.raises(MessageError):
        unpack(BAD_BODIES[kind], 2)


def test_good_bytes_are_taken() -> None:
    position, part = unpack(HEADER + torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy().tobytes(), 2)
    assert position == Position(round=1, tokens=5)
    assert part.params.tolist() == [1.0, 2.0] and part.momentum.tolist() == [3.0, 4.0]


# -- over a messenger -----------------------------------------------------------------------------------------

CARRIERS = [0] * len(SPACE.parts)


class Peers:
    """A donor of one rank and a joiner's messenger. Build it on the event loop."""

    def __init__(self, state: GlobalState) -> None:
        self.hub = Hub()
        self.donor_messenger = LoopbackMessenger(self.hub, "run", Endpoint("donor", 0))
        self.joiner_messenger = LoopbackMessenger(self.hub, "run", Endpoint("joiner", 0))
        self.donor = Donor(state, self.donor_messenger)
        self.member = Member(
            island="donor",
            incarnation="0" * 8,
            config_hash="c" * 32,
            control_addresses=[self.donor_messenger.address],
            transport_addresses=["loopback:donor/0"],
            round=1,
        )

    async def fetch(self, parts: list[int]) -> tuple[Description, dict]:
        async with asyncio.timeout(GUARD_SECONDS):
            return await fetch_state(self.joiner_messenger, self.member, SPACE, parts)


def test_a_joiner_gets_the_parts_it_asks_for() -> None:
    state = stepped(2)

    async def test() -> None:
        peers = Peers(state)
        peers.donor.describe("d" * 32, CARRIERS, SPACE.fingerprint)
        description, parts = await peers.fetch([1, 4])
        assert description.position == state.position and description.digest == "d" * 32
        assert sorted(parts) == [1, 4]
        assert all(torch.equal(parts[i].params, state.parts[i]) for i in parts)

    asyncio.run(test())


def refused(text: str, error: type[Exception] = MessageError, *, rounds: int = 2, **described: object) -> None:
    """Fetching fails with this text, from a donor that describes itself so."""

    async def test() -> None:
        state = stepped(rounds)
        peers = Peers(state)
        fields = {"digest": "d" * 32, "carriers": CARRIERS, "fingerprint": SPACE.fingerprint, **described}
        peers.donor.describe(**fields)
        with pytest.raises(error, match=text):
            await peers.fetch([0, 1])

    asyncio.run(test())


def test_an_island_that_has_committed_nothing_is_no_donor() -> None:
    refused("cannot be a donor", rounds=0)


def test_a_donor_with_another_model_is_refused() -> None:
    refused("trains another model", fingerprint="f" * 32)


@pytest.mark.parametrize("carriers", [CARRIERS[1:], [1] * len(CARRIERS)])
def test_a_donor_that_does_not_cover_the_model_is_refused(carriers: list[int]) -> None:
    refused("describes its state wrongly", carriers=carriers)


def test_a_donor_that_commits_meanwhile_is_refused() -> None:
    async def test() -> None:
        state = stepped(2)
        peers = Peers(state)
        peers.donor.describe("d" * 32, CARRIERS, SPACE.fingerprint)
        state.commit(values(5), Position(round=3, tokens=30))
        with pytest.raises(MessageError, match="committed a round while"):
            await peers.fetch([0])

    asyncio.run(test())


def test_a_donor_that_is_gone_is_lost() -> None:
    async def test() -> None:
        peers = Peers(stepped(1))
        peers.hub.lose("donor")
        with pytest.raises(PeerLost):
            await peers.fetch([0])

    asyncio.run(test())


@pytest.mark.parametrize("body", [b"", b"x", b"1", b'{"part":1e999}', b'{"part":"1"}', b'{"part":-1}', b"[" * 100_000])
def test_a_donor_refuses_requests_that_name_no_part(body: bytes) -> None:
    async def test() -> None:
        peers = Peers(stepped(1))
        with pytest.raises(MessageError, match=r"not a PartRequest|not carried"):
            await peers.joiner_messenger.call(
                peers.donor_messenger.address, "part", body, timeout_seconds=GUARD_SECONDS
            )

    asyncio.run(test())
