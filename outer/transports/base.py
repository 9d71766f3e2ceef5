"""The Transport interface, for bulk payloads. Control messages go through a Messenger, on
connections of their own.
"""

from collections.abc import Mapping
from typing import Protocol

import torch

from outer.network.endpoints import Endpoint, Tag, Traffic


class Transport(Protocol):
    """Moves payloads (1-D uint8 CPU tensors). All methods run on the one event loop that owns the
    transport.

    The caller limits every wait (asyncio.timeout). It may cancel a send or recv at any time, and
    may then call only `disconnect` and `close`.

    >>> import asyncio
    >>> from outer.network.endpoints import Leg
    >>> from outer.transports.loopback import Hub, LoopbackTransport
    >>> a, b = Endpoint("a", 0), Endpoint("b", 0)
    >>> async def example() -> list[int]:
    ...     hub = Hub()
    ...     ours, theirs = (LoopbackTransport(hub, "run", me, connect_seconds=5) for me in (a, b))
    ...     addresses = {a: ours.address, b: theirs.address}
    ...     joining = ours.connect("epoch-0", addresses), theirs.connect("epoch-0", addresses)
    ...     await asyncio.gather(*joining)
    ...     tag = Tag(round=0, attempt=0, leg=Leg.REDUCE, part=7)
    ...     await ours.send(b, tag, torch.tensor([1, 2, 3], dtype=torch.uint8))
    ...     return (await theirs.recv(a, tag, num_bytes=3)).tolist()
    >>> asyncio.run(example())
    [1, 2, 3]
    """

    traffic: Traffic
    max_payload_bytes: int
    """Longest payload that is accepted, in bytes. The owner sets it before `connect`; a longer
    payload is not read."""
    is_uneven: bool
    """Whether the connections of a group may come to share a slow link unevenly. New connections
    share it evenly."""

    @property
    def address(self) -> str:
        """The address at which other islands reach this endpoint. It is published in the membership
        record.
        """
        ...

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        """Join the group `epoch` of endpoints, which includes this one. All of its endpoints must
        call this.

        The group replaces any earlier one. Raises PeerLost or DeadlineError when an endpoint does
        not join.
        """

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        """Send `payload` and return when its buffer may be reused. Raises PeerLost."""

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        """Wait for the payload with this tag, of exactly `num_bytes`. Raises PeerLost or
        MessageError.
        """
        ...

    async def disconnect(self) -> None:
        """Leave the group and drop everything in flight. Call it after any error, before the next
        connect.

        Other endpoints that wait for this one get PeerLost, so they learn of an abort without
        waiting for a deadline.
        """

    async def close(self) -> None:
        """Free sockets, processes and files. Idempotent."""
