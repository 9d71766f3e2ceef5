"""The Membership interface: the records of the islands in a run, and the run's config."""

from typing import Protocol

from pydantic import Field

from outer.identity.island_key import PublicKey
from outer.network.messages import (
    MAX_RANKS,
    MAX_ROUND,
    MAX_TOKENS,
    Address,
    Digest,
    IslandName,
    Message,
    StepSeconds,
)


class TextPrint(Message):
    """The fingerprint of the text that all islands of the run should have."""

    tokens: int = Field(ge=1, lt=MAX_TOKENS)
    """Number of tokens of the text, held-out tokens included."""
    digest: Digest

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens with digest {self.digest[:12]}"


class Member(Message):
    """An island's record in the swarm. It comes from a peer, so it is validated strictly."""

    island: IslandName
    incarnation: str = Field(min_length=8, max_length=32, pattern=r"^[0-9a-f]+$")
    identity: PublicKey
    """The island's public key, the same for all its incarnations. The other half of the key
    signs its records."""
    config_hash: str = Field(min_length=16, max_length=64, pattern=r"^[0-9a-f]+$")
    control_addresses: list[Address] = Field(min_length=1, max_length=MAX_RANKS)
    """Messenger.address of each rank, in rank order."""
    transport_addresses: list[Address] = Field(min_length=1, max_length=MAX_RANKS)
    """Transport.address of each rank, in rank order."""
    round: int = Field(ge=0, lt=MAX_ROUND)
    """Number of rounds that the island has committed."""
    tokens: int = Field(default=0, ge=0, lt=MAX_TOKENS)
    """Number of tokens in all of its committed pseudo-gradients."""
    digest: str = Field(default="", max_length=64, pattern=r"^[0-9a-f]*$")
    """Digest of its global params and outer momentum."""
    step_seconds: StepSeconds = 0.0
    text: TextPrint | None = None
    """The fingerprint of its text; None if it reads no text that all islands have, or reads it
    in shards."""
    since: int = Field(default=0, ge=0, lt=MAX_ROUND)
    """With gossip, the first round in which others expect this island, so that all agree on the
    groups."""


class Membership(Protocol):
    """The records of a swarm: one Member per island and one config text per run. Only rank 0 of an
    island holds one.

    >>> import asyncio
    >>> from outer.membership.loopback import LoopbackMembership
    >>> from outer.transports.loopback import Hub
    >>> fields = {"incarnation": "0" * 8, "identity": "1" * 64, "config_hash": "2" * 16, "round": 0}
    >>> fields |= {"control_addresses": ["-"], "transport_addresses": ["-"]}
    >>> async def example() -> list[str]:
    ...     hub = Hub()
    ...     ours, theirs = LoopbackMembership(hub, "run", "a"), LoopbackMembership(hub, "run", "b")
    ...     await ours.announce(Member(island="a", **fields))
    ...     await theirs.announce(Member(island="b", **fields))
    ...     return list(await ours.members())
    >>> asyncio.run(example())
    ['a', 'b']
    """

    async def announce(self, member: Member) -> None:
        """Publish this island's record and keep it alive until `leave`. Call it again to change the
        record.

        Raises InputError when a live island with another identity has the same name.
        """

    def update(self, member: Member) -> None:
        """Change this island's record in the background, after `announce`. Must be called on the
        event loop.
        """

    async def members(self) -> dict[str, Member]:
        """Return the islands whose records are alive, by name, this island included. Malformed
        records are left out.
        """
        ...

    @property
    def trouble(self) -> str:
        """The reason why this island may not see the records of the others, or ""."""
        ...

    async def publish_config(self, text: str) -> None:
        """Publish the run's config (YAML) for joiners. The first text counts; later ones are
        ignored.
        """

    async def read_config(self) -> str | None:
        """Return the run's config text, or None when no island has published one."""
        ...

    async def leave(self) -> None:
        """Withdraw this island's record. Idempotent."""
