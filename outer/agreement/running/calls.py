"""The messenger calls that carry the messages of the round protocol, and a record of the calls
under way.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from outer.agreement.coordination import PlanNotice, PlanQuery
from outer.agreement.messages import (
    Goodbye,
    OutcomeQuery,
    OutcomeReply,
    Plan,
    Ready,
    Settled,
    Status,
    Vote,
    VoteList,
    VoteReceipt,
)
from outer.agreement.proofs.certificate import Proof, ProofQuery
from outer.agreement.running.peers import Peers
from outer.network.event_loop import Tasks
from outer.network.messages import Message, deflate

CALLS = (
    Ready,
    Status,
    Plan,
    PlanNotice,
    PlanQuery,
    Vote,
    VoteList,
    VoteReceipt,
    Settled,
    OutcomeQuery,
    ProofQuery,
    Goodbye,
)
"""Types of the messages that an island sends on its own initiative. The other types are replies."""
REPLIES: dict[type[Message], type[Message]] = {
    Ready: Status,
    Status: Status,
    Vote: VoteReceipt,
    VoteList: VoteReceipt,
    Settled: VoteReceipt,
    OutcomeQuery: OutcomeReply,
    ProofQuery: Proof,
}
"""Type of the reply by type of the message, for messages that have a reply."""


class OpenCalls:
    """The calls under way. All methods run on one event loop."""

    def __init__(
        self, peers: Peers, call: Callable[[str, Message, bytes], Coroutine[Any, Any, None]]
    ) -> None:
        """Create an empty record. `call` sends a message to an island, with the message's
        encoded bytes, and processes the reply.
        """
        self._peers = peers
        self._make = call
        self._tasks = Tasks()
        self._messages: dict[tuple[str, type[Message]], Message] = {}
        """The message that is being sent to an island now, by island and type of message."""

    def send(self, outbox: Iterable[tuple[str, Message]]) -> None:
        """Send messages to islands, except for repetitions of a call that has not ended yet."""
        bodies: dict[int, bytes] = {}
        for island, message in outbox:
            key = island, type(message)
            if self._messages.get(key) != message and self._peers.addresses(island):
                if id(message) not in bodies:
                    bodies[id(message)] = deflate(message.encode())
                self._messages[key] = message
                self._tasks.start(self._call(island, message, bodies[id(message)]))

    async def _call(self, island: str, message: Message, body: bytes) -> None:
        try:
            await self._make(island, message, body)
        finally:
            if self._messages.get(key := (island, type(message))) is message:
                del self._messages[key]
