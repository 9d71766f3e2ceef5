"""The leader of an island: it communicates with other islands for all ranks of its own.

Other islands see its membership record, its status, its ready messages, its votes, and the state
that it can provide. Only rank 0 has a leader. Calls start work on the event loop and wait for it.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

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
    """Communicates for the island that holds `replica`."""

    identity: Identity
    addresses: Sequence[tuple[str, str]]
    """(transport address, control address) of each rank of the island."""
    replica: Replica
    driver: ProtocolDriver
    membership: Membership
    event_loop: EventLoop
    donor: Donor
    link_kbit: int = 0
    """Rate of the island's link in kbit/s; 0 if it is not known."""
    loss_scale: Callable[[], int | None] = lambda: None
    """See LoopSettings."""
    _last_proof: Proof | None = field(default=None, init=False)
    """The proof when this island left. Its state may be saved later, when the event loop is
    closed.
    """

    def resume(self, proof: Proof) -> None:
        """Record that the replica holds the state of a checkpoint, which was saved with `proof`.
        Call it before `announce`.
        """
        self.event_loop.call(lambda: self._claims.restore(proof))
        # An island that learns that this state is newer than its own may request it at once.
        self.serve_state(included=[])
        # With `is_coming`, faster islands that resume from their checkpoints, too, wait for this
        # one.
        status = build_status(self.replica, is_coming=True)
        self.event_loop.call(lambda: self.driver.protocol.update_status(status))

    def announce(self) -> None:
        """Enter the membership and start to communicate with the others. Raises InputError when
        the name is taken.
        """
        self.event_loop.run(self.membership.announce(self._build_member(0.0)))
        self.event_loop.run(self.driver.start())

    def update_status(self, *, is_coming: bool, step_seconds: float) -> None:
        """Send the others the state that this island holds now, and whether it is coming to the
        next round.
        """
        status = build_status(self.replica, is_coming=is_coming)
        self.event_loop.run(self._update_status(self._build_member(step_seconds), status))

    def serve_state(self, included: Sequence[str]) -> None:
        """Serve the current state as a donor. `included`: incarnations whose progress its last
        commit contains.
        """
        replica = self.replica
        carriers = replica.redistribution.carriers
        fingerprint = replica.space.fingerprint
        self.donor.describe(replica.digest, carriers, fingerprint, included, self.proof)

    @property
    def proof(self) -> Proof:
        """The proof of the state that the replica holds; an empty one if there is none."""
        if self._last_proof is not None:
            return self._last_proof
        return self.event_loop.run(self._prove())

    def check(self, description: Description) -> None:
        """Raise MessageError if another island's state must not be taken. Must be called on the
        event loop.
        """
        self.driver.protocol.knowledge.check_proof(description.claim, description.proof)

    def build_ready(
        self,
        snapshot: Snapshot | None,
        first_unit: int,
        epoch: str,
        step_seconds: float,
        earlier: str | None,
    ) -> Ready:
        """Return the ready message for a plan, with this snapshot, or (None) as an observer.

        `first_unit`: where the lease of an observer begins; a contributor's follows from the
        snapshot. `earlier`: digest of the parts of the state to which this island would go back.
        """
        status = build_status(self.replica, is_coming=True)
        units = () if snapshot is None else snapshot.units
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
            expert_tokens=0 if snapshot is None else snapshot.expert_tokens,
            expert_counts=[] if snapshot is None else list(snapshot.expert_counts),
            listens=snapshot is None,
            base_tokens=status.tokens,
            digest=status.digest,
            first=first_unit,
            units=count(units),
            step_seconds=step_seconds,
            link_kbit=self.link_kbit,
            carriers=pack_carriers(self.replica.redistribution.carriers),
            earlier=earlier,
            loss_scale=self.loss_scale(),
            epoch=epoch,
            transport_addresses=[transport for transport, _ in self.addresses],
            control_addresses=[control for _, control in self.addresses],
        )

    def plan(self, build_ready: Callable[[], Ready], on_sent: Callable[[int], None]) -> Plan:
        """Agree on the next plan, and return it. `on_sent` is called with the round once the ready
        message is being sent.

        Raises BehindError, or QuorumError when too few islands join. See `ProtocolDriver.plan`.
        """
        return self.event_loop.run(self._plan(build_ready, on_sent))

    def contribute(self, build_ready: Callable[[], Ready]) -> None:
        """Announce that this island, until now an observer of the coming round, has a
        contribution.
        """
        self.event_loop.run(self._contribute(build_ready))

    def decide(self, vote: Vote, on_sent: Callable[[], None]) -> bool:
        """Return whether the plan commits by the votes of all. `on_sent` is called once this
        island's vote is being sent.
        """
        return self.event_loop.run(self.driver.decide(vote, on_sent))

    def explain_abort(self, plan: Plan) -> tuple[str, dict[str, str]]:
        """Return why the plan was not committed, and the islands that are left out of the next
        plan, with the reasons.
        """
        return self.event_loop.call(lambda: explain_abort(self.driver.protocol, plan))

    def has_dispute(self, plan: Plan) -> bool:
        """Return whether participants of the plan have voted for different digests."""
        return self.event_loop.call(lambda: self.driver.protocol.vote_table.has_dispute(plan))

    def interruption(self, seconds_left: float, *, entered_late: bool) -> Interruption:
        """Return why inner steps should end now, or "". See `ProtocolDriver.interruption`."""
        return self.event_loop.run(
            self.driver.interruption(seconds_left, entered_late=entered_late)
        )

    def find_donors(self) -> list[Member]:
        """Return the records of the islands that hold the surviving history; empty if this
        island holds it.
        """
        return self.event_loop.run(self.driver.find_donors())

    def disbelieve(self, donors: Sequence[Member]) -> None:
        """Ignore for a while that these islands claim to be ahead, because their state could not
        be taken. See `Knowledge`.
        """
        self.event_loop.run(self.driver.disbelieve(donors))

    def believe(self, donors: Sequence[Member]) -> None:
        """Accept these islands' claims, because their state has been taken, and forget earlier
        failures.
        """
        self.event_loop.run(self.driver.believe(donors))

    def wait_for_donors(self, seconds: float, num_expected: int) -> bool:
        """Wait up to `seconds` for donors, and return whether there are any.

        The wait ends early when `num_expected` islands, with this one, are known, and none of them
        is about to take another island's state.
        """

        def is_hopeless() -> bool:
            return self._num_islands >= num_expected and not self._has_stragglers

        return wait_for_donors(
            self.find_donors, self.event_loop, seconds, lambda: self.event_loop.call(is_hopeless)
        )

    def wait_to_join(self, seconds: float, first_commit_seconds: float) -> bool:
        """Wait up to `seconds` for donors, longer while other islands are here without a commit.
        Return whether there are any.
        """
        deadline = self.event_loop.time() + first_commit_seconds
        while not self.wait_for_donors(seconds, 1 << 62):
            if self.is_alone or self.event_loop.time() >= deadline:
                return False
            log.warning(
                "the islands here have committed no round yet: waiting for the first, at most %.0f "
                "s; an "
                "island that should begin the run with them must be started without island.joins",
                first_commit_seconds,
            )
        return True

    @property
    def is_alone(self) -> bool:
        """Whether no other live island has contacted this one."""
        return self.event_loop.call(lambda: self._num_islands == 1)

    def linger(self, seconds: float) -> bool:
        """Wait until every live island has reached this round. Return True if another history
        survives.
        """
        return self.event_loop.run(self.driver.linger(seconds))

    def leave(self, steps: int) -> None:
        """Send a goodbye, `steps` inner steps into the round. Islands that miss it will find
        this one lost instead.
        """
        me = self.identity.island
        incarnation = self.identity.incarnation
        goodbye = Goodbye(
            island=me, incarnation=incarnation, round=self.replica.position.round, steps=steps
        )
        with suppress(TimeoutError):
            self._last_proof = self.event_loop.run(self._prove(), LEAVE_SECONDS)
        self.event_loop.try_to(self.driver.say_goodbye(goodbye), LEAVE_SECONDS)
        self.event_loop.try_to(self.membership.leave(), LEAVE_SECONDS)

    # -- on the event loop -------------------------------------------------------------------------

    async def _prove(self) -> Proof:
        return self._claims.prove(build_status(self.replica, is_coming=True).claim)

    @property
    def _num_islands(self) -> int:
        # Records outlive the islands that wrote them, so only islands from which messages arrived
        # are counted.
        return 1 + len(self.driver.protocol.knowledge.live)

    @property
    def _has_stragglers(self) -> bool:
        """Whether an island that has a state is behind this one, or about to take a state.

        Islands without a state do not count: they may need a long time to get one.
        """
        knowledge = self.driver.protocol.knowledge
        mine = knowledge.status
        others = knowledge.live.values()
        return any(s.round > 0 and (s.rank < mine.rank or not s.is_coming) for s in others)

    @property
    def _claims(self) -> Claims:
        return self.driver.protocol.knowledge.claims

    async def _update_status(self, member: Member, status: Status) -> None:
        # This runs on the event loop, which owns the membership and the driver.
        self.membership.update(member)
        await self.driver.update_status(status)

    async def _plan(self, build_ready: Callable[[], Ready], on_sent: Callable[[int], None]) -> Plan:
        # The message is built on the event loop, like the message of `_contribute`, so that no
        # contribution is missed.
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
    """Return the status of an island that holds this replica."""
    position = replica.position
    return Status(
        round=position.round, tokens=position.tokens, digest=replica.digest, is_coming=is_coming
    )


def wait_for_donors(
    find_donors: Callable[[], Sequence[Member]],
    clock: Clock,
    seconds: float,
    is_hopeless: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait up to `seconds` on the clock for a donor, and return whether one was found. Stop
    early once `is_hopeless`.
    """
    found: list[Member] = []

    def is_decided() -> bool:
        # The order matters: an island that joins between the two calls may have the better state.
        is_over = is_hopeless()
        found[:] = find_donors()
        return bool(found) or is_over

    retry_blocking(is_decided, clock, seconds=seconds, pause_seconds=POLL_SECONDS)
    return bool(found)
