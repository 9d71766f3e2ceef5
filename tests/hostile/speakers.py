"""Attackers that speak as members: they have an island key of their own, the run key or none, and
outer's own wire.

A speaker announces itself as an island like the honest ones, hears what they say to it, and says
what it likes.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from diloco.config.schema import Config
from outer.agreement.messages import Ready, Status
from outer.agreement.running.peers import kind_of
from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings
from outer.errors import OuterError
from outer.identity.island_key import IslandKey
from outer.membership.base import Member
from outer.network.endpoints import Endpoint
from outer.network.messages import Message, parse
from outer.network.run_key import load_run_key
from tests.hostile.scene import NUM_HONEST, note_begin
from tests.swarm import Work

CALL_SECONDS = 5.0
ROUND_SECONDS = 0.5
"""Pause between two turns of a speaker. The honest ones make a round in about this time."""


class Speaker:
    """One name in the run. `readies` are the newest ready messages of the islands that have spoken
    to it.
    """

    def __init__(self, network: Network, name: str, key: IslandKey) -> None:
        assert network.membership is not None
        self.network, self.membership, self.name, self.key = network, network.membership, name, key
        self.incarnation = secrets.token_hex(8)
        self.readies: dict[str, Ready] = {}
        self.statuses: dict[str, Status] = {}
        self.changed = asyncio.Event()
        network.messenger.serve("ready", self._on_ready)
        network.messenger.serve("status", self._on_status)

    async def victims(self) -> dict[str, Member]:
        """Records of the honest islands, by name."""
        while True:
            found = await self.membership.members()
            honest = {
                name: m
                for name, m in found.items()
                if name.startswith("island-") and name != self.name
            }
            if len(honest) >= NUM_HONEST:
                return honest
            await asyncio.sleep(0.1)

    def record(self, like: Member, **changes: Any) -> Member:
        """A record of this name, which is like that of an honest island but for `changes`."""
        own = {
            "island": self.name,
            "incarnation": self.incarnation,
            "identity": self.key.public,
            "control_addresses": [self.network.messenger.address],
            "transport_addresses": [self.network.transport.address],
        }
        return like.model_copy(update=own | changes)

    def ready(self, like: Ready, **changes: Any) -> Ready:
        """A ready message of this name that fits a plan with the honest ones, but for `changes`."""
        own = {
            "island": self.name,
            "incarnation": self.incarnation,
            "key": self.key.public,
            "first": 0,
            "units": 0,
            "epoch": "",
            "control_addresses": [self.network.messenger.address],
            "transport_addresses": [self.network.transport.address],
        }
        return like.model_copy(update=own | changes)

    async def tell(self, member: Member, message: Message) -> bytes | None:
        """Say something to an island's leader. Returns its reply, or None if it refuses or does not
        answer.
        """
        with suppress(OuterError):
            return await self.network.messenger.call(
                member.control_addresses[0],
                kind_of(type(message)),
                message.encode(),
                timeout_seconds=CALL_SECONDS,
            )
        return None

    async def tell_all(self, message: Message) -> None:
        await asyncio.gather(
            *(self.tell(member, message) for member in (await self.victims()).values())
        )

    async def hear(self) -> Ready:
        """The next ready message of an honest island."""
        self.changed.clear()
        while not self.readies or not self.changed.is_set():
            await self.changed.wait()
        return max(self.readies.values(), key=lambda ready: (ready.round, ready.attempt))

    async def _on_ready(self, source: Endpoint, body: bytes) -> bytes:
        ready = parse(Ready, body)
        self.readies[source.island] = ready
        self.changed.set()
        return ready.status.encode()

    async def _on_status(self, source: Endpoint, body: bytes) -> bytes:
        self.statuses[source.island] = parse(Status, body)
        return body


@asynccontextmanager
async def speaker(
    config: Config, name: str, key: IslandKey | None = None
) -> AsyncIterator[Speaker]:
    """Open the network under a name. The config says whether the run key is known."""
    key = key or IslandKey.generate()
    settings = NetworkSettings(
        run_id=config.name,
        island=name,
        rank=0,
        bootstrap=config.island.bootstrap,
        island_key=key,
        run_key=load_run_key(config.island.run_key_file),
    )
    network = await open_network(config.outer.transport, settings)
    try:
        yield Speaker(network, name, key)
    finally:
        await network.close()


def fresh(name: str) -> str:
    """A name that nobody has used in the run."""
    return f"{name}-{os.getpid()}-{secrets.token_hex(2)}"


def spoken(
    say: Callable[[Speaker], Awaitable[None]], num_speakers: int = 1, prefix: str = "ghost"
) -> Work:
    """The work of an attacking process: so many speakers, each with a name and key of its own, do
    `say` for ever.
    """

    async def one(config: Config) -> None:
        async with speaker(config, fresh(prefix)) as made:
            note_begin(config)
            while True:
                await say(made)
                await asyncio.sleep(ROUND_SECONDS)

    async def all_of_them(config: Config) -> None:
        await asyncio.gather(*(one(config) for _ in range(num_speakers)))

    return lambda config, index: asyncio.run(all_of_them(config))
