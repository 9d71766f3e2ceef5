"""Support for tests of the agreement: islands' leaders on one event loop, with a real reduce over a loopback hub."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import torch

from outer.agreement import Agreement, Rules
from outer.attempt import Attempts
from outer.codecs import build_codec
from outer.deadlines import Deadlines
from outer.digest import combine
from outer.errors import OuterError
from outer.membership.base import Member
from outer.membership.loopback import LoopbackMembership, LoopbackMessenger
from outer.reduce import Reducer
from outer.rounds import Plan, Ready, Vote
from outer.space import Space
from outer.transports.base import Endpoint
from outer.transports.loopback import Hub, LoopbackTransport
from tests.outer.islands import Spec

T = TypeVar("T")

GUARD_SECONDS = 30.0
SPACE = Space([Spec("w", (20,))], part_elements=5)
START = "aa" * 16

Fault = Callable[["Leader", Plan], None]
"""Called at some point of an attempt; raising ends it there."""


class Gone(Exception):
    """The island has died."""


class Leader:
    """One island of one rank, without a model: plan, reduce, vote. Build it on the event loop."""

    def __init__(
        self, hub: Hub, name: str, *, quorum: int = 1, start_islands: int = 1, wait_seconds: float = 600.0
    ) -> None:
        self.hub, self.name = hub, name
        self.round, self.digest, self.tokens = 0, START, 100
        self.me = Endpoint(name, 0)
        self.messenger = LoopbackMessenger(hub, "run", self.me)
        self.membership = LoopbackMembership(hub, "run", name)
        self.transport = LoopbackTransport(hub, "run", self.me, GUARD_SECONDS)
        deadlines = Deadlines(wait_seconds)
        self.reducer = Reducer(self.transport, build_codec("fp32"), SPACE, self.me)
        self.attempts = Attempts(self.transport, self.reducer, deadlines)
        rules = Rules(quorum, start_islands, len(SPACE.parts))
        self.agreement = Agreement(name, rules, self.messenger, self.membership, deadlines)
        self.agreement.on_abort = self.attempts.note_no

    async def announce(self) -> None:
        """Let the others know of this island."""
        member = Member(
            island=self.name,
            incarnation="0" * 8 + self.name.encode().hex(),
            identity="0" * 8 + self.name.encode().hex(),
            config_hash="c" * 32,
            control_addresses=[self.messenger.address],
            transport_addresses=[self.transport.address],
            round=self.round,
        )
        await self.membership.announce(member)

    def enter(self, round_number: int, digest: str = START) -> None:
        """Stand where the run stands after `round_number` commits."""
        self.round = self.agreement.round = round_number
        self.digest = digest

    def ready(self) -> Ready:
        return Ready(
            island=self.name,
            incarnation="0" * 8 + self.name.encode().hex(),
            round=self.round,
            tokens=self.tokens,
            digest=self.digest,
            carriers=[(0, len(SPACE.parts))],
            epoch=self.attempts.epoch,
            transport_addresses=[self.transport.address],
            control_addresses=[self.messenger.address],
        )

    async def attempt(self, *, in_reduce: Fault | None = None, before_vote: Fault | None = None) -> tuple[Plan, bool]:
        """One attempt as the outer loop makes it, and whether it committed."""
        plan = await self.agreement.plan(self.ready())
        digest, cause = None, ""
        try:
            if in_reduce is not None:
                in_reduce(self, plan)
            digest = await self.reduce(plan)
            if before_vote is not None:
                before_vote(self, plan)
        except OuterError as error:
            digest, cause = None, str(error)
        is_committed = await self.agreement.decide(plan, digest, cause)
        if is_committed:
            self.enter(self.round + 1, digest or "")
        else:
            await self.attempts.drop()
        return plan, is_committed

    async def reduce(self, plan: Plan) -> str:
        """The digest of the mean."""
        value = float(ord(self.name[0]))
        means = await self.attempts.run(plan, {p.index: torch.full((p.num_elements,), value) for p in SPACE.parts})
        return combine([means[part.index].digest for part in SPACE.parts])

    async def attempt_until_committed(self) -> Plan:
        """The plan that committed."""
        while True:
            plan, is_committed = await self.attempt()
            if is_committed:
                return plan

    async def tell(self, to: "Leader", message: Ready | Plan | Vote) -> bytes:
        """Say something to another island, out of turn."""
        kind, body = type(message).__name__.lower(), message.model_dump_json().encode()
        return await self.messenger.call(to.messenger.address, kind, body, timeout_seconds=GUARD_SECONDS)

    def vote(self, plan: Plan, digest: str | None) -> Vote:
        return Vote(round=plan.round, attempt=plan.attempt, island=self.name, digest=digest)


def fail(leader: Leader, plan: Plan) -> None:
    """A fault: this island cannot go on with the attempt, but lives."""
    raise OuterError("disk full")


def die(leader: Leader, plan: Plan) -> None:
    """A fault: the island is gone."""
    leader.hub.lose(leader.name)
    raise Gone


async def leaders(names: str, hub: Hub | None = None, **rules: Any) -> list[Leader]:
    """Islands that know of one another."""
    hub = hub or Hub()
    found = [Leader(hub, name, **rules) for name in names]
    for leader in found:
        await leader.announce()
    return found


async def together(*work: Awaitable[T]) -> list[T | BaseException]:
    """What came of each."""
    return await asyncio.gather(*work, return_exceptions=True)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine; a hang ends as a failure."""

    async def guarded() -> None:
        async with asyncio.timeout(GUARD_SECONDS):
            await test()

    asyncio.run(guarded())
