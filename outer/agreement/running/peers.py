"""Access of an island's leader to the other islands: membership records, control addresses and
calls.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from outer.errors import PeerLost, TransportError
from outer.membership.base import Member, Membership, TextPrint
from outer.membership.texts import TextComparison
from outer.network.deadlines import Deadlines
from outer.network.endpoints import Messenger
from outer.network.event_loop import Tasks, loop_time
from outer.network.messages import MAX_REFUSAL_BYTES, M, Message, longest_reply, receive_reply

log = logging.getLogger(__name__)

RANK_CALL_SECONDS = 5.0


class Peers:
    """The other islands of the run. Islands with a different config hash are ignored."""

    def __init__(
        self,
        me: str,
        messenger: Messenger,
        membership: Membership,
        deadlines: Deadlines,
        config_hash: str,
        text: TextPrint | None = None,
    ) -> None:
        """Create the table of peers. `text`: fingerprint of this island's text, which is
        compared with those of others.
        """
        self.members: dict[str, Member] = {}
        """Membership records of the other islands at the last `refresh`, by island."""
        self._me = me
        self._membership = membership
        self._config_hash = config_hash
        self._texts = TextComparison(text)
        self.messenger = messenger
        self.deadlines = deadlines
        self.direct_addresses: dict[str, list[str]] = {}
        """Control addresses from the islands' own messages, used before those in their records, by
        island.
        """
        self._gone: dict[str, str] = {}
        """Incarnations that have left, by island. Their records may stay visible for a while."""
        self.check_freeze: Callable[[], None] = lambda: None
        """Function that counts a freeze of this process in `deadlines`. The failure detector
        sets it."""
        self._notices = Tasks()

    @property
    def trouble(self) -> str:
        """The reason why this island may not see the records of the others, or ""."""
        return self._membership.trouble

    async def refresh(self) -> bool:
        """Read the membership records again. Return False if they cannot be read now."""
        try:
            found = await self._membership.members()
        except TransportError as error:
            log.debug("the membership records could not be read: %s", error)
            return False
        self.members = {
            name: m
            for name, m in found.items()
            if name != self._me
            and m.config_hash == self._config_hash
            and self._gone.get(name) != m.incarnation
        }
        self._texts.look(self.members)
        return True

    def remove(self, island: str, incarnation: str) -> None:
        """Ignore this incarnation of an island, which has left the run."""
        self._gone[island] = incarnation
        self.members.pop(island, None)

    def addresses(self, island: str) -> list[str]:
        """Return the control addresses of the island's ranks, or an empty list if they are not
        known.
        """
        recorded = self.members[island].control_addresses if island in self.members else []
        return self.direct_addresses.get(island, recorded)

    async def call(
        self, island: str, kind: str, body: bytes, answer: type[Message] | None = None
    ) -> bytes:
        """Call the island's leader and return the reply; call twice if the connection breaks.
        Raises PeerLost, DeadlineError or MessageError.

        At most the largest size of an `answer` is read, or a short word if there is none.
        """
        longest = MAX_REFUSAL_BYTES if answer is None else longest_reply(answer)
        for is_last in (False, True):
            addresses = self.addresses(island)
            started = loop_time()
            num_freezes = self.deadlines.num_freezes
            if not addresses:
                raise PeerLost(island, "its address is not known")
            try:
                limit = self.deadlines.limit("call")
                reply = await self.messenger.call(
                    addresses[0], kind, body, timeout_seconds=limit, longest=longest
                )
            except PeerLost:
                self.direct_addresses.pop(
                    island, None
                )  # They may be wrong while those in the record are right.
                if is_last:
                    raise
            else:
                self.check_freeze()
                self.deadlines.observe("call", loop_time() - started, num_freezes)
                return reply
        raise AssertionError("the last try returns or raises")

    async def read_reply(self, island: str, model: type[M], reply: bytes) -> M:
        """Parse the reply of the island's leader. Raises MessageError."""
        return await receive_reply(
            self.messenger, (self.addresses(island) or [""])[0], model, reply
        )

    def notify_other_ranks(self, island: str, kind: str, body: bytes) -> None:
        """Call the island's ranks other than the leader, without waiting for their replies."""
        addresses = self.addresses(island)[1:]
        for address in addresses:
            self._notices.start(self._notify(address, kind, body))

    async def _notify(self, address: str, kind: str, body: bytes) -> None:
        with suppress(TransportError):
            await self.messenger.call(address, kind, body, timeout_seconds=RANK_CALL_SECONDS)


def kind_of(model: type[Message]) -> str:
    """Return the kind of messenger call that carries messages of this type."""
    return model.__name__.lower()


@dataclass(frozen=True)
class Identity:
    """Names of this island in the run. A new process of the same island is a new incarnation."""

    island: str
    incarnation: str
    identity: str
    """Identifier that stays the same over restarts."""
    config_hash: str
    text: TextPrint | None = None
    """The fingerprint of the island's text, on the leader only."""
