"""Fetches single parts for a download: the part itself, or the means that bring it to the wanted
round.
"""

import asyncio
from collections.abc import Callable

import torch

from outer.errors import MessageError
from outer.network.deadlines import Deadlines
from outer.network.event_loop import loop_time
from outer.state.part_state import PartState, advance, unpack, unpack_mean
from outer.transfer.cache import PartsCache
from outer.transfer.donor import PART_SECONDS, MeanRequest, PartRequest
from outer.transfer.donor_client import DonorClient
from outer.transfer.download_plan import DownloadPlan


class PartFetcher:
    """The parts of a download, and the checks that each of them passes. All methods run on one
    event loop.
    """

    def __init__(
        self,
        plan: DownloadPlan,
        cache: PartsCache | None = None,
        on_first_part: Callable[[int], None] = lambda round_number: None,
    ) -> None:
        """Create a fetcher. `on_first_part` is called with the round of the first part, once it
        has arrived and is in the cache.
        """
        self.parts: dict[int, PartState] = {}
        """Parts that have arrived, by index."""
        self.bytes_received = 0
        """Bytes of all replies with parts or means."""
        self.arrived_at = 0.0
        """Time of the last progress, on the event loop's clock."""
        self.deadlines = Deadlines(PART_SECONDS)
        self._plan = plan
        self._cache = cache
        self._on_first_part = on_first_part
        self.tokens: dict[int, int] = {}
        """Number of committed tokens by round. A donor that reports another number belongs to
        another history."""
        self._has_begun = False

    async def fetch(
        self, donor: DonorClient, worker: int, part: int, target: int, patience: Callable[[], float]
    ) -> bool:
        """Bring the part to round `target` or a later one. Return False if the donor is busy or
        behind.

        Raises TransportError. See `DonorClient.request` for `patience`.
        """
        while (state := self.parts.get(part)) is None or state.round < target:
            if state is not None and not self._plan.changes(part, state.round):
                self.parts[part] = advance(state, None, self._plan.optimizer_for(part))
                continue
            if state is None or self._plan.mean_bytes(part, state.round, target) > state.num_bytes:
                request = PartRequest(part=part, at_least=target, worker=worker)
            else:
                request = MeanRequest(part=part, round=state.round, worker=worker)
            status, body = await donor.request(request, self.deadlines, patience)
            self.bytes_received += len(body)
            if status == b"part" and isinstance(request, PartRequest):
                await self._receive_part(donor, part, body, target)
            elif status == b"mean" and state is not None and isinstance(request, MeanRequest):
                self.parts[part] = await asyncio.to_thread(self._apply_mean, part, state, body)
            elif status == b"gone" and isinstance(request, MeanRequest):
                del self.parts[part]
            elif status in (b"busy", b"behind"):
                donor.cause = f"it is {status.decode()}"
                return False
            else:
                raise MessageError(f"it answers {status[:20]!r} when asked for part {part}")
            self.arrived_at = loop_time()
        return True

    def check_history(self, round_number: int, tokens: int) -> None:
        """Raise MessageError if another donor has reported a different number of tokens for this
        round.
        """
        if (known := self.tokens.setdefault(round_number, tokens)) != tokens:
            cause = f"{tokens} tokens at round {round_number}, but {known} from another donor"
            raise MessageError(f"it is of another history: {cause}")

    async def _receive_part(self, donor: DonorClient, part: int, body: bytes, target: int) -> None:
        bounds = self._plan.space.parts[part]
        position, state = await asyncio.to_thread(
            unpack, body, bounds.num_elements, has_momentum=not bounds.is_replaced
        )
        if position.round < target:
            raise MessageError(
                f"it sent part {part} of round {position.round}, asked for {target} or later"
            )
        if position.round > donor.round + 1:
            await donor.update_description(is_forced=True)
        # A rank may have committed slightly before its leader describes the round.
        if position.round > donor.round + 1:
            raise MessageError(
                f"it sent part {part} of round {position.round}, but is in round {donor.round}"
            )
        self.check_history(position.round, position.tokens)
        if self._cache is not None:
            await asyncio.to_thread(self._cache.write, part, state)
        if not self._has_begun:
            self._has_begun = True
            self._on_first_part(position.round)
        self.parts[part] = state

    def _apply_mean(self, part: int, state: PartState, body: bytes) -> PartState:
        num_contributors, payload = unpack_mean(body)
        coded = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            if payload
            else torch.empty(0).byte()
        )
        codec = self._plan.coding.mean_codec_for(self._plan.space.parts[part])
        mean = codec.decode(coded, state.params.numel())
        return advance(
            state, mean, self._plan.optimizer_for(part), num_contributors, self._plan.num_islands
        )
