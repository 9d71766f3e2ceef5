"""The other islands as the leader reaches them: their records, their addresses, calls to them."""

import asyncio
import logging
from contextlib import suppress

from outer.deadlines import Deadlines
from outer.errors import PeerLost, TransportError
from outer.membership.base import Member, Membership, Messenger
from outer.rounds import Message

log = logging.getLogger(__name__)

RANK_CALL_SECONDS = 5.0


class Peers:
    """Of the island `me`; islands with another config are none."""

    def __init__(
        self, me: str, messenger: Messenger, membership: Membership, deadlines: Deadlines, config_hash: str
    ) -> None:
        self.members: dict[str, Member] = {}
        """The other islands' records, as last seen."""
        self._me, self._config_hash = me, config_hash
        self._messenger, self._membership, self._deadlines = messenger, membership, deadlines
        self._direct: dict[str, list[str]] = {}
        """Control addresses that islands have told us themselves: fresher than their records."""
        self._gone: dict[str, str] = {}
        """Incarnations that have said goodbye: their records may live on for a while."""
        self._calls: set[asyncio.Task[None]] = set()

    async def find(self) -> bool:
        """Read the records anew; whether that was possible."""
        try:
            found = await self._membership.members()
        except TransportError as error:
            log.debug("the members could not be read: %s", error)
            return False
        self.members = {
            name: m
            for name, m in found.items()
            if name != self._me and m.config_hash == self._config_hash and self._gone.get(name) != m.incarnation
        }
        return True

    def learn(self, island: str, control_addresses: list[str]) -> None:
        """An island has told us its addresses."""
        self._direct[island] = control_addresses

    def part(self, island: str, incarnation: str) -> None:
        """An island has said goodbye."""
        self._gone[island] = incarnation
        self.members.pop(island, None)

    def forget(self, island: str) -> None:
        """What it told us of its addresses may be wrong: its record counts again."""
        self._direct.pop(island, None)

    def addresses(self, island: str) -> list[str]:
        """Control addresses of the island's ranks; none when they are not known."""
        if island in self._direct:
            return self._direct[island]
        member = self.members.get(island)
        return member.control_addresses if member is not None else []

    async def call(self, island: str, kind: str, body: bytes) -> bytes:
        """The reply of the island's leader. Raises PeerLost, DeadlineError or MessageError.

        A connection that broke is tried once more: only then is the island lost.
        """
        for is_last in (False, True):
            addresses, started = self.addresses(island), asyncio.get_running_loop().time()
            if not addresses:
                raise PeerLost(island, "its address is not known")
            try:
                limit = self._deadlines.limit("call")
                reply = await self._messenger.call(addresses[0], kind, body, timeout_seconds=limit)
            except PeerLost:
                self.forget(island)
                if is_last:
                    raise
            else:
                self._deadlines.observe("call", asyncio.get_running_loop().time() - started)
                return reply
        raise AssertionError("the last try returns or raises")

    def tell_other_ranks(self, island: str, kind: str, body: bytes) -> None:
        """Call the island's ranks above 0, without waiting for what they say."""
        for address in self.addresses(island)[1:]:
            task = asyncio.create_task(self._try(address, kind, body))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _try(self, address: str, kind: str, body: bytes) -> None:
        with suppress(TransportError):
            await self._messenger.call(address, kind, body, timeout_seconds=RANK_CALL_SECONDS)


def kind_of(model: type[Message]) -> str:
    """The call that carries such messages."""
    return model.__name__.lower()


def name_of(message: Message) -> str:
    """Tells a repetition from something new to say."""
    return str(hash(message.model_dump_json()))
