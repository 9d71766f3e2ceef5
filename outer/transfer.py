"""State from an island that has committed to one that has not: params, momentum, position; never a residual.

Each rank of the joiner takes the parts it carries, from the ranks that carry them in the donor's island.
"""

import asyncio
from collections.abc import Sequence

from pydantic import Field

from outer.errors import MessageError
from outer.membership.base import Member, Messenger
from outer.rounds import Message, check_carriers, pack_carriers, parse, unpack_carriers
from outer.space import Space
from outer.state import GlobalState, PartState, Position, unpack
from outer.transports.base import Endpoint

PART_SECONDS = 120.0
"""For one part of a few megabytes: 30 kB/s, slower than any link worth training over."""
PARTS_AT_ONCE = 4


class Description(Message):
    """What a donor says of its state before any of it is sent."""

    digest: str = Field(pattern=r"^[0-9a-f]{16,64}$")
    """Of params and momentum; the joiner must find the same."""
    position: Position
    fingerprint: str = Field(pattern=r"^[0-9a-f]{16,64}$")
    """Of the canonical space."""
    carriers: list[list[int]] = Field(max_length=1 << 20)


class PartRequest(Message):
    """Which part is to be sent."""

    part: int


class Donor:
    """Serves this rank's parts; on the leader also their description, once there is one."""

    def __init__(self, state: GlobalState, messenger: Messenger) -> None:
        self._state = state
        self._description: bytes | None = None
        messenger.serve("state", self._on_state)
        messenger.serve("part", self._on_part)

    def describe(self, digest: str, carriers: Sequence[int], fingerprint: str) -> None:
        """Say what joiners will find; call it after each commit. A fresh island is never a donor."""
        if self._state.position.round == 0:
            return
        self._description = (
            Description(
                digest=digest,
                position=self._state.position,
                fingerprint=fingerprint,
                carriers=[list(pair) for pair in pack_carriers(carriers)],
            )
            .model_dump_json()
            .encode()
        )

    async def _on_state(self, source: Endpoint, body: bytes) -> bytes:
        if self._description is None:
            raise MessageError("this island has committed no round: it cannot be a donor")
        return self._description

    async def _on_part(self, source: Endpoint, body: bytes) -> bytes:
        return await asyncio.to_thread(self._state.pack, parse(PartRequest, body).part)


async def fetch_state(
    messenger: Messenger, donor: Member, space: Space, parts: Sequence[int]
) -> tuple[Description, dict[int, PartState]]:
    """The donor's state of these parts, all of one position. Raises TransportError."""
    body = await messenger.call(donor.control_addresses[0], "state", b"", timeout_seconds=PART_SECONDS)
    description = parse(Description, body)
    if description.fingerprint != space.fingerprint:
        raise MessageError(f"island {donor.island!r} trains another model: its parameters differ from this island's")
    carriers = _carriers_of(description, donor, len(space.parts))
    gate = asyncio.Semaphore(PARTS_AT_ONCE)

    async def one(index: int) -> PartState:
        address, request = donor.control_addresses[carriers[index]], PartRequest(part=index).model_dump_json().encode()
        async with gate:
            reply = await messenger.call(address, "part", request, timeout_seconds=PART_SECONDS)
        position, state = unpack(reply, space.parts[index].num_elements)
        if position != description.position:
            raise MessageError(f"island {donor.island!r} committed a round while its state was being taken")
        return state

    states = await asyncio.gather(*(one(index) for index in parts))
    return description, dict(zip(parts, states, strict=True))


def _carriers_of(description: Description, donor: Member, num_parts: int) -> list[int]:
    pairs = [(pair[0], pair[1]) for pair in description.carriers if len(pair) == 2]
    try:
        check_carriers(pairs, num_parts, len(donor.control_addresses))
    except MessageError as error:
        raise MessageError(f"island {donor.island!r} describes its state wrongly: {error}") from None
    return unpack_carriers(pairs)
