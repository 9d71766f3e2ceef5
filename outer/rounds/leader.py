"""The leader of an island: it speaks with other islands for all ranks of its own.

Other islands see its membership record, its status, its readiness for a round, its votes, and the state it can give.
Only rank 0 has a leader. Calls start work on the event loop and wait for it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outer.agreement.messages import Goodbye, Plan, Ready, Status, Vote
from outer.agreement.proofs.certificate import Proof
from outer.agreement.proofs.claims import Claims
from outer.agreement.running.driver import Interruption, ProtocolDriver
from outer.agreement.running.peers import Identity
from outer.agreement.running.waiting import explain_abort
from outer.leases.ranges import count
from outer.membership.base import Member, Membership
from outer.network.event_loop import EventLoop
from outer.network.messages import pack_carriers
from outer.network.retry import Clock, retry_blocking
from outer.state.pseudo_gradient import Snapshot
from outer.state.replica import Replica
from outer.transfer.donor import Description, Donor

log = logging.getLogger(__name__)

LEAVE_SECONDS = 3.0
POLL_SECONDS = 0.2


@dataclass
class Leader:
    """Speaks for the island that holds `replica`."""

    identity: Identity
    addresses: Sequence[tuple[str, str]]
    """(transport address, control address) of each rank of the island."""
    replica: Replica
    driver: ProtocolDriver
    membership: Membership
    event_loop: EventLoop
    donor: Donor
    link_kbit: int = 0
    """Rate of the island's link; 0 if it is not known."""

    def resume(self, proof: Proof) -> None:
        """The replica holds the state of a checkpoint, which was saved with `proof`. Call it before `announce`."""
        self.event_loop.call(lambda: self._claims.restore(proof))
        # Whoever hears that this state is newer than its own may ask for it at once.
        self.serve_state(included=[])
        # It is coming: faster islands that go on from their checkpoints, too, wait for it.
        status = build_status(self.replica, is_coming=True)
        self.event_loop.call(lambda: self.driver.protocol.update_status(status))

    def announce(self) -> None:
        """Enter the membership and start to speak with the others. Raises InputError when the name is taken."""
        self.event_loop.run(self.membership.announce(self._build_member(0.0)))
        self.event_loop.run(self.driver.start())

    def update_status(self, *, is_coming: bool, step_seconds: float) -> None:
        """Tell the others which state this island holds now, and whether it is on its way to the next round."""
        status = build_status(self.replica, is_coming=is_coming)
        self.event_loop.run(self._update_status(self._build_member(step_seconds), status))

    def serve_state(self, included: Sequence[str]) -> None:
        """Be a donor of the current state. `included`: incarnations whose progress its last commit contains."""
        replica = self.replica
        carriers, fingerprint = replica.redistribution.carriers, replica.space.fingerprint
        self.donor.describe(replica.digest, carriers, fingerprint, included, self.proof)

    @property
    def proof(self) -> Proof:
        """The proof of the state that the replica holds; an empty one if there is none."""
        claim = build_status(self.replica, is_coming=True).claim
        return self.event_loop.call(lambda: self._claims.prove(claim))

    def check(self, description: Description) -> None:
        """Raise MessageError if another island's state must not be taken. Call it on the event loop."""
        self.driver.protocol.knowledge.check_proof(description.claim, description.proof)

    def build_ready(
        self, snapshot: Snapshot | None, first_unit: int, epoch: str, step_seconds: float, earlier: str | None
    ) -> Ready:
        """The message that this island could take part in a plan now, with this snapshot or (None) as an observer.

        `first_unit` is where the lease of an observer begins; a contributor's follows from the snapshot. `earlier`:
        digest of the parts of the state to which this island would go back.
        """
        status, units = build_status(self.replica, is_coming=True), () if snapshot is None else snapshot.units
        if snapshot is not None:
            first_unit = units[0][0] if units else 0
        return Ready(
            island=self.identity.island,
            incarnation=self.identity.incarnation,
            key=self.driver.protocol.knowledge.signer.public,
            round=status.round,
            attempt=self.driver.protocol.next_attempt,
            tokens=0 if snapshot is None else snapshot.tokens,
            weight=0 if snapshot is None else snapshot.weight,
            listens=snapshot is None,
            base_tokens=status.tokens,
            digest=status.digest,
            first=first_unit,
            units=count(units),
            step_seconds=step_seconds,
            link_kbit=self.link_kbit,
            carriers=pack_carriers(self.replica.redistribution.carriers),
            earlier=earlier,
            epoch=epoch,
            transport_addresses=[transport for transport, _ in self.addresses],
            control_addresses=[control for _, control in self.addresses],
        )

    def plan(self, build_ready: Callable[[], Ready], on_sent: Callable[[int], None]) -> Plan:
        """Agree on the next plan. `on_sent` is called with the round when the ready message is on its way.

        Raises BehindError, or QuorumError when too few islands come. See `ProtocolDriver.plan`.
        """
        return self.event_loop.run(self._plan(build_ready, on_sent))

    def contribute(self, build_ready: Callable[[], Ready]) -> None:
        """Tell the others that this island, so far an observer of the coming round, has a contribution."""
        self.event_loop.run(self._contribute(build_ready))

    def decide(self, vote: Vote, on_sent: Callable[[], None]) -> bool:
        """Whether the plan commits, by the votes of all. `on_sent` is called when this island's vote is on its way."""
        return self.event_loop.run(self.driver.decide(vote, on_sent))

    def explain_abort(self, plan: Plan) -> tuple[str, dict[str, str]]:
        """Why the plan was not committed, and which islands are left out of the next one, with the reason."""
        return self.event_loop.call(lambda: explain_abort(self.driver.protocol, plan))

    def has_dispute(self, plan: Plan) -> bool:
        """Whether participants of the plan have voted for different digests."""
        return self.event_loop.call(lambda: self.driver.protocol.vote_table.has_dispute(plan))

    def interruption(self, seconds_left: float, *, entered_late: bool) -> Interruption:
        """See `ProtocolDriver.interruption`."""
        return self.event_loop.run(self.driver.interruption(seconds_left, entered_late=entered_late))

    def find_donors(self) -> list[Member]:
        """Records of the islands that hold the history which survives, if it is not this island's."""
        return self.event_loop.run(self.driver.find_donors())

    def disbelieve(self, donors: Sequence[Member]) -> None:
        """Their state could not be taken: ignore for a while that they claim to be ahead. See `Knowledge`."""
        self.event_loop.run(self.driver.disbelieve(donors))

    def believe(self, donors: Sequence[Member]) -> None:
        """Their state has been taken: forget earlier failures."""
        self.event_loop.run(self.driver.believe(donors))

    def wait_for_donors(self, seconds: float, num_expected: int) -> bool:
        """Whether there are donors, waited for up to `seconds`.

        The wait ends early when so many islands, with this one, are known, and none of them is about to take the state
        of this island or another.
        """

        def is_hopeless() -> bool:
            return self._num_islands >= num_expected and not self._has_stragglers

        return wait_for_donors(self.find_donors, self.event_loop, seconds, lambda: self.event_loop.call(is_hopeless))

    def wait_to_join(self, seconds: float, first_commit_seconds: float) -> bool:
        """Whether there are donors, waited for up to `seconds`; longer while others are there without a commit yet."""
        deadline = self.event_loop.time() + first_commit_seconds
        while not self.wait_for_donors(seconds, 1 << 62):
            if self.is_alone or self.event_loop.time() >= deadline:
                return False
            log.warning(
                "the islands that are there have committed no round yet: waiting for the first, at most %.0f s; an "
                "island that is to begin the run with them is started without island.joins",
                first_commit_seconds,
            )
        return True

    @property
    def is_alone(self) -> bool:
        """Whether no other island has spoken to this one, or all that have are lost."""
        return self.event_loop.call(lambda: self._num_islands == 1)

    def linger(self, seconds: float) -> bool:
        """Wait until every live island has reached this round. Returns True if another history survives."""
        return self.event_loop.run(self.driver.linger(seconds))

    def leave(self, steps: int) -> None:
        """Say goodbye, `steps` inner steps into the round; islands that miss it find out without it."""
        me, incarnation = self.identity.island, self.identity.incarnation
        goodbye = Goodbye(island=me, incarnation=incarnation, round=self.replica.position.round, steps=steps)
        self.event_loop.try_to(self.driver.say_goodbye(goodbye), LEAVE_SECONDS)
        self.event_loop.try_to(self.membership.leave(), LEAVE_SECONDS)

    # -- on the event loop ------------------------------------------------------------------------------------

    @property
    def _num_islands(self) -> int:
        # Membership records outlive the islands that wrote them, so only islands that have spoken count.
        return 1 + len(self.driver.protocol.knowledge.live)

    @property
    def _has_stragglers(self) -> bool:
        """Whether an island that has a state is behind this one, or about to take a state.

        Islands without a state are no stragglers: it may take long to get one.
        """
        knowledge = self.driver.protocol.knowledge
        mine, others = knowledge.status, knowledge.live.values()
        return any(s.round > 0 and (s.rank < mine.rank or not s.is_coming) for s in others)

    @property
    def _claims(self) -> Claims:
        return self.driver.protocol.knowledge.claims

    async def _update_status(self, member: Member, status: Status) -> None:
        # On the event loop, which owns membership and driver.
        self.membership.update(member)
        await self.driver.update_status(status)

    async def _plan(self, build_ready: Callable[[], Ready], on_sent: Callable[[int], None]) -> Plan:
        # The message is built on the event loop, like that of `_contribute`, so that no contribution is missed.
        ready = build_ready()
        return await self.driver.plan(ready, lambda: on_sent(ready.round))

    async def _contribute(self, build_ready: Callable[[], Ready]) -> None:
        await self.driver.contribute(build_ready())

    def _build_member(self, step_seconds: float) -> Member:
        status = build_status(self.replica, is_coming=True)
        return Member(
            island=self.identity.island,
            incarnation=self.identity.incarnation,
            identity=self.identity.identity,
            config_hash=self.identity.config_hash,
            control_addresses=[control for _, control in self.addresses],
            transport_addresses=[transport for transport, _ in self.addresses],
            round=status.round,
            tokens=status.tokens,
            digest=status.digest,
            step_seconds=step_seconds,
            text=self.identity.text,
        )


def build_status(replica: Replica, *, is_coming: bool) -> Status:
    """The status of an island that holds this replica."""
    position = replica.position
    return Status(round=position.round, tokens=position.tokens, digest=replica.digest, is_coming=is_coming)


def wait_for_donors(
    find_donors: Callable[[], Sequence[Member]],
    clock: Clock,
    seconds: float,
    is_hopeless: Callable[[], bool] = lambda: False,
) -> bool:
    """Whether a donor is found within `seconds` of the clock. Stops waiting as soon as it is hopeless."""
    found: list[Member] = []

    def is_decided() -> bool:
        # In this order: an island that comes in between may be the one with the better state.
        is_over = is_hopeless()
        found[:] = find_donors()
        return bool(found) or is_over

    retry_blocking(is_decided, clock, seconds=seconds, pause_seconds=POLL_SECONDS)
    return bool(found)
