"""Who is in the run, and how islands speak to one another outside of bulk payloads."""

from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from outer.transports.base import Endpoint

Handler = Callable[[Endpoint, bytes], Awaitable[bytes]]
"""Answers one call of an endpoint. What it raises of MessageError or InputError goes back to the caller as a text."""


Lane = Literal["control", "bulk"]
"""bulk: bodies of megabytes, which small calls must not wait behind."""


class Member(BaseModel):
    """An island's record in the swarm. Validated strictly: it comes from a peer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    island: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    incarnation: str = Field(min_length=8, max_length=32, pattern=r"^[0-9a-f]+$")
    identity: str = Field(min_length=8, max_length=64, pattern=r"^[0-9a-f]+$")
    """The same for every incarnation of an island: a restarted one takes its own place at once."""
    config_hash: str = Field(min_length=16, max_length=64, pattern=r"^[0-9a-f]+$")
    control_addresses: list[str] = Field(min_length=1, max_length=4096)
    """Messenger.address of each rank, in rank order."""
    transport_addresses: list[str] = Field(min_length=1, max_length=4096)
    """Transport.address of each rank, in rank order."""
    round: int = Field(ge=0, lt=1 << 30)
    tokens: int = Field(default=0, ge=0, lt=1 << 62)
    """Behind the state: all that its committed pseudo-gradients were trained on."""
    digest: str = Field(default="", max_length=64, pattern=r"^[0-9a-f]*$")
    """Of the global params and outer momentum."""
    step_seconds: float = Field(default=0.0, ge=0)
    """Median time of an inner step; 0: not measured yet."""
    since: int = Field(default=0, ge=0, lt=1 << 30)
    """With gossip, the first round in which others count on it: so all that read its record in time find the same."""


class Messenger(Protocol):
    """Small calls between endpoints, on connections that bulk payloads do not share."""

    @property
    def address(self) -> str:
        """Where other endpoints reach this one."""
        ...

    def serve(self, kind: str, handler: Handler) -> None:
        """Answer calls of `kind` with `handler`. One handler a kind."""
        ...

    async def call(
        self, address: str, kind: str, body: bytes, *, timeout_seconds: float, lane: Lane = "control"
    ) -> bytes:
        """The reply of the endpoint at `address`. Calls of different lanes go over connections of their own.

        Raises PeerLost when it cannot be reached or its connection breaks, DeadlineError when the reply does
        not come in time, MessageError when it refuses (its text) or answers with malformed bytes.
        """
        ...

    async def close(self) -> None:
        """Stop serving and drop all connections. Idempotent."""
        ...


class Membership(Protocol):
    """The swarm's records: one Member an island, one config text a run. Only an island's rank 0 holds one."""

    async def announce(self, member: Member) -> None:
        """Publish this island's record and keep it alive until `leave`; call again to change it.

        Raises InputError when a live island with another identity holds the same name.
        """
        ...

    def update(self, member: Member) -> None:
        """Change this island's record after `announce`, in the background. On the event loop, as all else."""
        ...

    async def members(self) -> dict[str, Member]:
        """The islands whose records are alive, by name, this one included. Malformed records are left out."""
        ...

    async def publish_config(self, text: str) -> None:
        """Put the run's config (YAML) where joiners find it; the first to come wins, equal texts are no conflict."""
        ...

    async def read_config(self) -> str | None:
        """The run's config text, or None when no island has published one."""
        ...

    async def leave(self) -> None:
        """Withdraw this island's record. Idempotent."""
        ...


def endpoints_of(member: Member) -> dict[Endpoint, str]:
    """Every endpoint of an island with its transport address, in rank order."""
    return {Endpoint(member.island, rank): a for rank, a in enumerate(member.transport_addresses)}
