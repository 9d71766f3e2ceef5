"""Support for tests of outer/agreement: leaders of islands on one event loop, with a real reduce
over loopback.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, TypeVar

import torch

from outer.agreement.knowledge import Knowledge
from outer.agreement.messages import Goodbye, Plan, Ready, Status, Vote
from outer.agreement.rules import Rules
from outer.agreement.running.driver import ProtocolDriver
from outer.agreement.running.peers import Peers
from outer.agreement.state_machine import RoundProtocol
from outer.codecs import build_codec
from outer.codecs.choice import build_uniform_choice
from outer.errors import OuterError, PoisonError, StalledError
from outer.membership.base import Member
from outer.membership.loopback import LoopbackMembership, LoopbackMessenger
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Endpoint, Handler, Lane
from outer.network.event_loop import FROZEN_SECONDS
from outer.network.messages import Message, pack_carriers
from outer.reduce.attempt import Attempts
from outer.reduce.payloads import Mean
from outer.reduce.reducer import Reducer
from outer.report import Waiting
from outer.space.digest import combine_digests, part_digest
from outer.space.layout import Space
from outer.transports.loopback import Hub, LoopbackTransport
from tests.outer.clock import GUARD_SECONDS, stand_still
from tests.outer.donors import Spec
from tests.outer.nets import key_of
from tests.outer.signers import claims_of, public_of

T = TypeVar("T")

TOKENS = 100
SPACE = Space([Spec("w", (20,))], part_elements=5)
START = "aa" * 16
CONFIG_HASH = "c" * 32

Fault = Callable[["Leader", Plan], None]
"""A function that is called at some point of an attempt. If it raises, the attempt ends there."""


class Gone(Exception):
    """The island has died."""


class FreezingMessenger:
    """A messenger whose process can be frozen: while it is, it neither calls nor answers."""

    def __init__(self, messenger: LoopbackMessenger) -> None:
        self._messenger = messenger
        self.is_awake = asyncio.Event()
        self.is_awake.set()

    @property
    def address(self) -> str:
        return self._messenger.address

    def serve(self, kind: str, handler: Handler) -> None:
        async def awake(source: Endpoint, body: bytes) -> bytes:
            await self.is_awake.wait()
            return await handler(source, body)

        self._messenger.serve(kind, awake)

    async def call(
        self,
        address: str,
        kind: str,
        body: bytes,
        *,
        timeout_seconds: float,
        lane: Lane = "control",
        longest: int = 0,
    ) -> bytes:
        await self.is_awake.wait()
        return await self._messenger.call(
            address, kind, body, timeout_seconds=timeout_seconds, lane=lane, longest=longest
        )

    async def close(self) -> None:
        await self._messenger.close()


class Rank:
    """One rank of an island: it reduces its parts and receives no votes."""

    def __init__(self, hub: Hub, run_id: str, me: Endpoint, deadlines: Deadlines) -> None:
        self.messenger = FreezingMessenger(LoopbackMessenger(hub, run_id, me))
        self.transport = LoopbackTransport(hub, run_id, me, GUARD_SECONDS)
        self.reducer = Reducer(self.transport, build_uniform_choice(build_codec("fp32")), SPACE, me)
        self.attempts = Attempts(self.transport, self.reducer, deadlines)
        if me.rank > 0:
            self.messenger.serve("vote", self.attempts.on_vote)


class Leader:
    """One island without a model that plans, reduces and votes. Build it on the event loop."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        *,
        run_id: str = "run",
        num_ranks: int = 1,
        wait_seconds: float = 600.0,
        incarnation: str = "00",
        config_hash: str = CONFIG_HASH,
        on_wait: Callable[[Waiting | None], None] = lambda waiting: None,
        **rules: Any,
    ) -> None:
        self.hub, self.name, self.config_hash = hub, name, config_hash
        self.incarnation = incarnation + name.encode().hex().zfill(6)
        self.deadlines = Deadlines(wait_seconds)
        self.ranks = [
            Rank(hub, run_id, Endpoint(name, rank), self.deadlines) for rank in range(num_ranks)
        ]
        self.messenger, self.attempts = self.ranks[0].messenger, self.ranks[0].attempts
        self.membership = LoopbackMembership(hub, run_id, name)
        start = Status(round=0, tokens=0, digest=START)
        self.knowledge = Knowledge(
            name, Rules(num_parts=len(SPACE.parts), **rules), start, claims_of(name)
        )
        self.protocol = RoundProtocol(self.knowledge)
        peers = Peers(name, self.messenger, self.membership, self.deadlines, config_hash)
        self.driver = ProtocolDriver(
            self.protocol, peers, on_no=self.attempts.record_no_vote, on_wait=on_wait
        )

    async def announce(self, **changes: Any) -> None:
        """Publish this island's membership record."""
        status = self.knowledge.status
        fields = {
            "island": self.name,
            "incarnation": self.incarnation,
            "identity": key_of(self.name).public,
            "config_hash": self.config_hash,
            "control_addresses": [rank.messenger.address for rank in self.ranks],
            "transport_addresses": [rank.transport.address for rank in self.ranks],
            "round": status.round,
            "tokens": status.tokens,
            "digest": status.digest,
        }
        await self.membership.announce(Member(**(fields | changes)))

    @property
    def round(self) -> int:
        return self.knowledge.status.round

    @property
    def digest(self) -> str:
        return self.knowledge.status.digest

    def enter(self, round_number: int, digest: str = START, *, tokens: int | None = None) -> None:
        """Hold the state after `round_number` commits of three islands, or after `tokens`
        tokens.
        """
        tokens = 3 * TOKENS * round_number if tokens is None else tokens
        self.protocol.update_status(Status(round=round_number, tokens=tokens, digest=digest))

    def take_state(self, donor: "Leader") -> None:
        """Hold the donor's state."""
        self.protocol.update_status(donor.knowledge.status)

    def ready(self) -> Ready:
        num_ranks = len(self.ranks)
        return Ready(
            island=self.name,
            incarnation=self.incarnation,
            key=public_of(self.name),
            round=self.round,
            attempt=self.protocol.next_attempt,
            tokens=TOKENS,
            weight=TOKENS,
            base_tokens=self.knowledge.status.tokens,
            digest=self.digest,
            carriers=pack_carriers(
                [part.index * num_ranks // len(SPACE.parts) for part in SPACE.parts]
            ),
            epoch=self.attempts.offered_epoch,
            transport_addresses=[rank.transport.address for rank in self.ranks],
            control_addresses=[rank.messenger.address for rank in self.ranks],
        )

    async def plan(self) -> Plan:
        return await self.driver.plan(self.ready())

    async def attempt(
        self, *, in_reduce: Fault | None = None, before_vote: Fault | None = None
    ) -> tuple[Plan, bool]:
        """Make one attempt like the outer loop. Returns the plan and whether it committed."""
        plan = await self.plan()
        try:
            await asyncio.sleep(0.01)  # By then the others have the plan.
            await self._meet(in_reduce, plan)
            digest = await self.reduce(plan)
            await self._meet(before_vote, plan)
            vote = Vote.yes(plan, self.name, digest)
        except OuterError as error:
            vote = Vote.no(
                plan,
                self.name,
                str(error),
                error.peer if isinstance(error, PoisonError | StalledError) else None,
            )
        is_committed = await self.driver.decide(vote)
        if is_committed:
            tokens = self.knowledge.status.tokens + TOKENS * len(plan.names)
            await self.driver.update_status(
                Status(round=plan.round + 1, tokens=tokens, digest=vote.digest or "")
            )
        else:
            await asyncio.gather(*(rank.attempts.drop() for rank in self.ranks))
        return plan, is_committed

    async def _meet(self, fault: Fault | None, plan: Plan) -> None:
        if fault is not None:
            fault(self, plan)
        await self.messenger.is_awake.wait()

    async def reduce(self, plan: Plan) -> str:
        """Reduce on all ranks and return the digest of the mean."""
        found = await asyncio.gather(*(self._reduce(plan, rank) for rank in range(len(self.ranks))))
        means = {part: mean for each in found for part, mean in each.items()}
        return combine_digests([part_digest(means[part.index].payload) for part in SPACE.parts])

    async def _reduce(self, plan: Plan, rank: int) -> dict[int, Mean]:
        value = float(ord(self.name[0]))
        carried = [p for p in SPACE.parts if p.index * len(self.ranks) // len(SPACE.parts) == rank]
        values = {p.index: torch.full((p.num_elements,), value) for p in carried}
        return await self.ranks[rank].attempts.run(plan, values)

    async def attempt_until_committed(self) -> Plan:
        """Make attempts until one commits, and return its plan."""
        while True:
            plan, is_committed = await self.attempt()
            if is_committed:
                return plan

    async def tell(self, to: "Leader", message: Message) -> bytes:
        """Send a message to another island out of turn."""
        kind, body = type(message).__name__.lower(), message.model_dump_json().encode()
        return await self.messenger.call(to.messenger.address, kind, body, timeout_seconds=5.0)

    def goodbye(self) -> Goodbye:
        return Goodbye(island=self.name, incarnation=self.incarnation, round=self.round, steps=0)

    async def say_goodbye(self) -> None:
        """Leave the run like an island."""
        await self.driver.say_goodbye(self.goodbye())
        await self.membership.leave()

    def hears(self, names: str, kind: Literal["ready", "status"] = "ready") -> Callable[[], bool]:
        """A check whether all of these islands have sent a ready message, or a status, of this
        island's round.
        """

        def has_heard() -> bool:
            known = self.protocol.readies.latest if kind == "ready" else self.knowledge.statuses
            return all(name in known and known[name].round == self.round for name in names)

        return has_heard


def fail(leader: Leader, plan: Plan) -> None:
    """Fault: this island fails the attempt, but lives."""
    raise OuterError("disk full")


def die(leader: Leader, plan: Plan) -> None:
    """Fault: the island dies."""
    leader.hub.lose(leader.name)
    raise Gone


def freeze(leader: Leader, plan: Plan | None = None) -> None:
    """Fault: the island freezes, and its connections stay open."""
    for rank in leader.ranks:
        rank.messenger.is_awake.clear()


async def wake(leader: Leader) -> None:
    """Wake a frozen island, which detects by the clock that it was frozen."""
    stand_still(2 * FROZEN_SECONDS)
    await asyncio.sleep(0.01)
    for rank in leader.ranks:
        rank.messenger.is_awake.set()


async def leaders(names: str, hub: Hub | None = None, **options: Any) -> list[Leader]:
    """Islands that know each other."""
    hub = hub or Hub()
    found = [Leader(hub, name, **options) for name in names]
    for leader in found:
        await leader.announce()
    for leader in found:
        await leader.driver.start()
        await leader.driver.update_status(leader.knowledge.status)
    return found


async def together(*work: Awaitable[T]) -> list[T | BaseException]:
    """Results of all, or their exceptions."""
    return await asyncio.gather(*work, return_exceptions=True)


def plans_of(
    results: Iterable[tuple[Plan, bool] | BaseException],
) -> list[tuple[int, list[str], bool]]:
    """(attempt, participants, is committed) of each result. Raises the first exception."""
    found = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        plan, is_committed = result
        found.append((plan.attempt, plan.names, is_committed))
    return found


def split(islands: list[Leader], name: str) -> tuple[Leader, list[Leader]]:
    """The island with this name, and the others."""
    return next(i for i in islands if i.name == name), [i for i in islands if i.name != name]
