"""A member with the run key claims to be ahead with a state that it has made up: nobody follows it
or takes it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Status
from outer.agreement.proofs.certificate import Certificate, Proof
from outer.agreement.proofs.claims import Claims
from outer.agreement.proofs.witnesses import Witnesses
from outer.agreement.rules import Rules
from outer.agreement.running.driver import ProtocolDriver
from outer.agreement.running.peers import Peers
from outer.agreement.state_machine import RoundProtocol
from outer.connect.settings import Network
from outer.errors import MessageError
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint
from outer.network.messages import Message, pack_carriers
from outer.network.run_key import RunKey
from outer.state.part_state import Position
from outer.transfer.donor import Description
from outer.transfer.donor_client import DonorClient, find_description
from tests.outer.donors import NUM_PARTS, SPACE
from tests.outer.membership.test_membership import wait_for
from tests.outer.nets import Swarm, member, run, swarm
from tests.outer.signers import certify

KEY = RunKey(b"k" * 32)
START = Status(round=0, tokens=0, digest="00" * 16)
HELD = Status(round=3, tokens=300, digest="aa" * 16)
MADE_UP = Status(round=9, tokens=9000, digest="bb" * 16)
networks = pytest.mark.parametrize(
    "kind", ["gloo", pytest.param("hivemind", marks=pytest.mark.slow)]
)


@dataclass
class Honest:
    """An island of a run in which two commit."""

    name: str
    network: Network
    driver: ProtocolDriver

    @property
    def knowledge(self) -> Knowledge:
        return self.driver.protocol.knowledge

    async def follows(self) -> list[str]:
        return [donor.island for donor in await self.driver.find_donors()]


async def enter(place: Swarm, name: str, status: Status) -> tuple[Network, str]:
    network = await place.open(Endpoint(name, 0), run_key=KEY)
    assert network.membership is not None
    addresses = {
        "control_addresses": [network.messenger.address],
        "transport_addresses": [network.transport.address],
    }
    claim = {"round": status.round, "tokens": status.tokens, "digest": status.digest}
    await network.membership.announce(member(name, **addresses, **claim))
    return network, network.messenger.address


async def open_honest(place: Swarm, name: str) -> Honest:
    network, _ = await enter(place, name, START)
    assert network.membership is not None
    knowledge = Knowledge(name, Rules(quorum=2), START, Claims(Witnesses(network.signer)))
    peers = Peers(
        name, network.messenger, network.membership, Deadlines(600), member(name).config_hash
    )
    driver = ProtocolDriver(
        RoundProtocol(knowledge), peers, on_no=lambda *args: None, rejections=network.rejections
    )
    return Honest(name, network, driver)


@asynccontextmanager
async def open_run(kind: str) -> AsyncIterator[tuple[Swarm, Honest, Honest, Network]]:
    """Islands a and b, which have committed a round together and have met the island "liar"."""
    async with swarm(kind, run_key=KEY) as place:
        a, b = await open_honest(place, "a"), await open_honest(place, "b")
        held = certify(HELD, {"a": a.network.signer, "b": b.network.signer})
        for island in (a, b):
            island.knowledge.claims.restore(Proof(certificate=held))
            island.driver.protocol.update_status(HELD)
        liar, _ = await enter(place, "liar", MADE_UP)
        yield place, a, b, liar


async def lie(liar: Network, certificate: Certificate, to: Honest) -> None:
    """Claim to be ahead, answer the question for a proof with this one, and give the state to
    whoever asks.
    """
    proof = Proof(certificate=certificate)
    description = Description(
        digest=MADE_UP.digest,
        position=Position(round=MADE_UP.round, tokens=MADE_UP.tokens),
        fingerprint=SPACE.fingerprint,
        carriers=pack_carriers([0] * NUM_PARTS),
        proof=proof,
    )

    def answer(kind: str, message: Message) -> None:
        async def reply(source: Endpoint, body: bytes) -> bytes:
            return message.encode()

        liar.messenger.serve(kind, reply)

    for kind, message in (("proofquery", proof), ("state", description), ("status", MADE_UP)):
        answer(kind, message)
    await liar.messenger.call(
        to.network.messenger.address, "status", MADE_UP.encode(), timeout_seconds=20
    )


async def has_refused(island: Honest) -> bool:
    # Over and over: the first look at the members may not find the liar's address yet.
    await island.driver.find_donors()
    island.driver._detector.ping()
    island.driver._send_outbox()
    return any(
        (who, kind) == ("liar", "proof") for who, kind, *_ in island.network.rejections.drain()
    )


@networks
def test_a_member_that_makes_up_a_state_is_followed_by_nobody(kind: str) -> None:
    async def main() -> None:
        async with open_run(kind) as (place, a, b, liar):
            joiner = await open_honest(place, "joiner")
            invented = {
                name: (await place.open(Endpoint(name, 0), run_key=KEY)).signer
                for name in ("x", "y")
            }
            for island, helpers in ((a, invented), (b, {}), (joiner, {})):
                await lie(liar, certify(MADE_UP, {"liar": liar.signer} | helpers), island)
                await wait_for(lambda: has_refused(island), True, seconds=30)  # noqa: B023
                assert "liar" not in await island.follows()
            assert await a.follows() == await b.follows() == []
            # The state that two islands have committed is taken.
            for island in (a, b):
                address, body = joiner.network.messenger.address, HELD.encode()
                await island.network.messenger.call(address, "status", body, timeout_seconds=20)
            await wait_for(joiner.follows, ["a", "b"], seconds=30)

    run(main())


@networks
def test_a_joiner_takes_no_description_that_one_member_has_made_up(kind: str) -> None:
    async def main() -> None:
        async with open_run(kind) as (place, a, b, liar):
            joiner = await open_honest(place, "joiner")
            donor = member("liar", control_addresses=[liar.messenger.address])
            client = DonorClient(donor, joiner.network.messenger, SPACE)

            def check(description: Description) -> None:
                joiner.knowledge.check_proof(description.claim, description.proof)

            await lie(liar, certify(MADE_UP, {"liar": liar.signer}), joiner)
            with pytest.raises(
                MessageError, match="liar does not prove it: 1 of the 2 islands needed"
            ):
                await find_description([client], None, wait_seconds=20, check=check)
            stolen = certify(HELD, {"a": a.network.signer, "b": b.network.signer})
            await lie(liar, stolen, joiner)
            with pytest.raises(MessageError, match="the certificate is of another state"):
                await find_description([client], None, wait_seconds=20, check=check)

    run(main())
