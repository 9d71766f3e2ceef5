"""Endpoints, the kinds of frames and tags of payloads between them, traffic counters, and the
interface for calls.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, get_args

ISLAND_NAME = "[A-Za-z0-9._-]{1,64}"
RUN_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
MAX_PAYLOAD_BYTES = 1 << 30
"""Limit for a payload where no other limit is given."""


@dataclass(frozen=True, order=True)
class Endpoint:
    """One rank of one island: the source or destination of a payload."""

    island: str
    rank: int

    def __str__(self) -> str:
        return f"{self.island}/{self.rank}"


class Kind(IntEnum):
    """The type of a frame, which tells what the frame contains."""

    HELLO = 0  # the dialer's name, group and keys; the rank is in the header
    PAYLOAD = 1
    CALL = 2
    REPLY = 3
    REFUSAL = 4  # the text of an error, as UTF-8; with request 0 the whole stream is refused
    CHALLENGE = 5  # the acceptor's name, keys and proof
    PROOF = 6  # the dialer's proof
    END = 7  # nothing follows on this stream of payloads, and no peer is lost
    ACK = 8  # the payload with this tag has arrived


class Leg(IntEnum):
    """The leg of the all-to-all reduce to which a payload belongs."""

    REDUCE = 0  # a participant's pseudo-gradient part, to the part's reducer
    GATHER = 1  # the encoded mean, from the reducer to every other participant


@dataclass(frozen=True)
class Tag:
    """Identifies a payload. A tag is used once between a given pair of endpoints."""

    round: int
    attempt: int
    leg: Leg
    part: int


@dataclass
class Traffic:
    """Bytes that left and entered this process, frames and headers included."""

    bytes_sent: int = 0
    bytes_received: int = 0


Handler = Callable[[Endpoint, bytes], Awaitable[bytes]]
"""Function that answers a call, given the caller and the body. The text of a TransportError or
InputError goes to the caller."""

Lane = Literal["control", "bulk"]
"""Lane of a call. The bulk lane is for bodies of megabytes, so that small calls do not wait
behind them."""
LANES: tuple[Lane, ...] = get_args(Lane)


class Messenger(Protocol):
    """Makes and answers small calls between endpoints, on connections that bulk payloads do not
    share.

    >>> import asyncio
    >>> from outer.membership.loopback import LoopbackMessenger
    >>> from outer.transports.loopback import Hub
    >>> async def example() -> bytes:
    ...     hub = Hub()
    ...     server, client = (LoopbackMessenger(hub, "run", Endpoint(name, 0)) for name in "ab")
    ...     async def greet(source: Endpoint, body: bytes) -> bytes:
    ...         return b"hello " + source.island.encode()
    ...     server.serve("greet", greet)
    ...     return await client.call(server.address, "greet", b"", timeout_seconds=5)
    >>> asyncio.run(example())
    b'hello b'
    """

    @property
    def address(self) -> str:
        """The address at which other endpoints reach this one."""
        ...

    def serve(self, kind: str, handler: Handler) -> None:
        """Answer calls of `kind` with `handler`, replacing an earlier handler of that kind."""

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
        """Call the endpoint at `address` and return its reply. Each lane has a connection of its
        own.

        `longest`: size in bytes of the longest reply that the caller accepts. A longer one is not
        read, and ends the connection. 0 means the lane's own limit. Raises PeerLost when the
        endpoint cannot be reached or its connection breaks, DeadlineError when no reply comes in
        time, and MessageError when the endpoint refuses (with its text) or sends malformed bytes.
        """
        ...

    def on_malformed(self, address: str, cause: str) -> None:
        """Record that the endpoint at this address has sent a malformed reply. After a few of
        them it is no longer called.
        """

    async def close(self) -> None:
        """Stop serving and drop all connections. Idempotent."""
