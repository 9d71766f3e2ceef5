"""The transport seam: bytes between named endpoints. It knows no numerics.

Bulk payloads only. Control messages go through a Messenger, on connections of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch


@dataclass(frozen=True, order=True)
class Endpoint:
    """One rank of one island: what a payload is sent to."""

    island: str
    rank: int

    def __str__(self) -> str:
        return f"{self.island}/{self.rank}"


class Phase(IntEnum):
    """Which leg of the all-to-all reduce a payload belongs to."""

    REDUCE = 0  # a participant's pseudo-gradient part, to the part's reducer
    GATHER = 1  # the encoded mean, from the reducer to every other participant


@dataclass(frozen=True)
class Tag:
    """What a payload is. A tag is used once between a given pair of endpoints."""

    round: int
    attempt: int
    phase: Phase
    part: int


@dataclass
class Traffic:
    """Bytes that left and entered this process, frames and headers included."""

    bytes_sent: int = 0
    bytes_received: int = 0


class Transport(Protocol):
    """Moves payloads (1-D uint8 CPU tensors). All methods run on the one event loop that owns the transport.

    Every wait is bounded by the caller (asyncio.timeout); cancelling a send or recv is allowed at any time,
    after which only `disconnect` and `close` are.
    """

    traffic: Traffic

    @property
    def address(self) -> str:
        """Where other islands reach this endpoint; goes into the membership record."""
        ...

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        """Join the group `epoch` of endpoints, this one included; all of them must call it.

        Replaces any earlier group. Raises PeerLost or DeadlineError when an endpoint does not come.
        """
        ...

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        """Hand `payload` to the network; returns when its buffer may be reused. Raises PeerLost."""
        ...

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        """The payload with this tag, of exactly `num_bytes`. Raises PeerLost or MessageError."""
        ...

    async def disconnect(self) -> None:
        """Leave the group and drop what is in flight; to be called after any error, before the next connect.

        The other endpoints' waits for this one end with PeerLost: an abort is heard without a deadline.
        """
        ...

    async def close(self) -> None:
        """Free sockets, processes and files. Idempotent."""
        ...
