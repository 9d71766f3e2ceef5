"""What an island shows of itself to the swarm: its record, where it stands, that it is ready, the state it can give.

On the leader only; the calls run work on the event loop and wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outer.agreement import Agreement, Interruption
from outer.donor import Donor
from outer.island_state import IslandState, Snapshot
from outer.loop import LoopThread
from outer.membership.base import Member, Membership
from outer.rounds import Goodbye, Ready, Standing, pack_carriers
from outer.runs import count

LEAVE_SECONDS = 3.0


@dataclass(frozen=True)
class Identity:
    """Who this island is in the run. A new process of the same island is a new incarnation."""

    island: str
    incarnation: str
    identity: str
    """The same for every incarnation."""
    config_hash: str


class Presence:
    """Speaks for the island whose state is `held`; `addresses` are (transport, control) of each rank."""

    def __init__(
        self,
        identity: Identity,
        addresses: Sequence[tuple[str, str]],
        held: IslandState,
        agreement: Agreement,
        membership: Membership,
        loop: LoopThread,
    ) -> None:
        self.agreement = agreement
        self._identity, self._held, self._membership, self._loop = identity, held, membership, loop
        self._transport_addresses = [transport for transport, _ in addresses]
        self._control_addresses = [control for _, control in addresses]

    def resume(self) -> None:
        """This island holds a state that was saved. To be called before `announce`."""
        self._loop.run(self._resume())

    @property
    def num_islands(self) -> int:
        """Islands that this one has heard of since it began, itself among them; records outlive who wrote them."""
        return 1 + len(self.agreement.protocol.live)

    def announce(self) -> None:
        """Enter the membership, and begin to speak with the others. Raises InputError when the name is taken."""
        self._loop.run(self._membership.announce(self._member(0.0)))
        self._loop.run(self.agreement.start())

    def stand(self, *, is_coming: bool, step_seconds: float = 0.0) -> None:
        """Tell the others of the state that this island holds now, and whether to wait for it."""
        self._loop.run(self._stand(self._member(step_seconds), standing_of(self._held, is_coming=is_coming)))

    def offer(self, donor: Donor, included: Sequence[str]) -> None:
        """Be a donor of the state held now; `included`: incarnations whose progress its last commit contains."""
        donor.describe(self._held.digest, self._held.exchange.carriers, self._held.space.fingerprint, included)

    def ready(self, snapshot: Snapshot | None, first: int, epoch: str, step_seconds: float) -> Ready:
        """This island's word that it could take part in a plan now, with this snapshot; None: it listens.

        `first`: the unit of text that its lease begins with, for one that listens.
        """
        standing, units = standing_of(self._held, is_coming=True), () if snapshot is None else snapshot.units
        if snapshot is not None:
            first = units[0][0] if units else 0
        return Ready(
            island=self._identity.island,
            incarnation=self._identity.incarnation,
            round=standing.round,
            attempt=self.agreement.protocol.next_attempt,
            tokens=0 if snapshot is None else snapshot.tokens,
            weight=0 if snapshot is None else snapshot.weight,
            listens=snapshot is None,
            base_tokens=standing.tokens,
            digest=standing.digest,
            first=first,
            units=count(units),
            step_seconds=step_seconds,
            carriers=pack_carriers(self._held.exchange.carriers),
            epoch=epoch,
            transport_addresses=self._transport_addresses,
            control_addresses=self._control_addresses,
        )

    def interruption(self, seconds_left: float, *, entered_late: bool) -> Interruption:
        """See `Agreement.interruption`."""
        return self._loop.run(self.agreement.interruption(seconds_left, entered_late=entered_late))

    def find_donors(self) -> list[Member]:
        """Islands that hold the history which survives, if it is another than this island's."""
        return self._loop.run(self.agreement.find_donors())

    def linger(self, seconds: float) -> bool:
        """Stay until all that live have this island's round; whether another history than its own survives."""
        return self._loop.run(self.agreement.linger(seconds))

    def leave(self, steps: int) -> None:
        """Say goodbye, `steps` inner steps into the round; who does not hear it in time finds out without it."""
        me, incarnation = self._identity.island, self._identity.incarnation
        goodbye = Goodbye(island=me, incarnation=incarnation, round=self._held.mine.position.round, steps=steps)
        self._loop.try_to(self.agreement.say_goodbye(goodbye), LEAVE_SECONDS)
        self._loop.try_to(self._membership.leave(), LEAVE_SECONDS)

    async def _resume(self) -> None:
        # It comes: others that go on from their checkpoints, too, and are faster, wait for it.
        self.agreement.protocol.stand(standing_of(self._held, is_coming=True))

    async def _stand(self, member: Member, standing: Standing) -> None:
        # On the event loop, whose things no other thread may touch.
        self._membership.update(member)
        await self.agreement.stand(standing)

    def _member(self, step_seconds: float) -> Member:
        standing = standing_of(self._held, is_coming=True)
        return Member(
            island=self._identity.island,
            incarnation=self._identity.incarnation,
            identity=self._identity.identity,
            config_hash=self._identity.config_hash,
            control_addresses=self._control_addresses,
            transport_addresses=self._transport_addresses,
            round=standing.round,
            tokens=standing.tokens,
            digest=standing.digest,
            step_seconds=step_seconds,
        )


def standing_of(held: IslandState, *, is_coming: bool) -> Standing:
    """Where an island with this state stands."""
    position = held.mine.position
    return Standing(round=position.round, tokens=position.tokens, digest=held.digest, is_coming=is_coming)
