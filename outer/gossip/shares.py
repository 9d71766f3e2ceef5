"""The shares of a gossip round, part by part: encoding them, and fetching a partner's share."""

import asyncio
from collections.abc import Mapping, Sequence

import torch

from outer.codecs import build_codec
from outer.codecs.base import Codec
from outer.codecs.choice import CodecChoice
from outer.connect.settings import Network
from outer.errors import MessageError, NonFiniteError, OuterError, TransportError, first_cause
from outer.gossip.partners import PartnerRoute
from outer.gossip.server import Take
from outer.gossip.step import Share
from outer.network.deadlines import Deadlines
from outer.network.event_loop import loop_time
from outer.space.layout import Part, Space

TAKES_AT_ONCE = 8
"""Number of parts that are fetched from one partner at the same time."""
Shares = dict[int, Share]
"""Shares by carried part."""


class ShareCoding:
    """Encodes a part as the payload of its pseudo-gradient followed by the payload of its global
    params.
    """

    def __init__(self, space: Space, codecs: CodecChoice, params_codec: str) -> None:
        """`codecs`: those of pseudo-gradients. `params_codec`: the codec of global params."""
        self._space = space
        self._coding = codecs
        self._params = build_codec(params_codec)

    def encode(self, part: int, share: Share) -> torch.Tensor:
        """Return the payload, newly allocated. Raises OuterError with the parameter's name for
        inf and nan.
        """
        try:
            pseudo_grad, params = self._codecs(part)
            return torch.cat([pseudo_grad.encode(share.pseudo_grad), params.encode(share.params)])
        except NonFiniteError as error:
            name = self._space.name_at(self._space.parts[part].start + error.index)
            raise OuterError(f"the pseudo-gradient of {name!r} holds {error.value}") from None

    def decode(self, part: int, payload: torch.Tensor) -> Share:
        """Decode a payload (1-D uint8). Raises MessageError if it has another size or a value is
        not finite.
        """
        num_elements = self._part(part).num_elements
        sizes = [codec.num_bytes(num_elements) for codec in self._codecs(part)]
        if payload.numel() != sum(sizes):
            raise MessageError(f"part {part} has {payload.numel()} bytes, expected {sum(sizes)}")
        pieces = zip(self._codecs(part), payload.split(sizes), strict=True)
        return Share(*(codec.decode(piece, num_elements) for codec, piece in pieces))

    def _codecs(self, part: int) -> tuple[Codec, Codec]:
        return self._coding.codec_for(self._part(part)), self._params

    def _part(self, part: int) -> Part:
        return self._space.parts[part]


class ShareDownload:
    """Fetches the parts in `carried` from the partners' carriers, on the network's event loop."""

    def __init__(
        self, coding: ShareCoding, carried: Sequence[int], network: Network, deadlines: Deadlines
    ) -> None:
        self.coding = coding
        self._carried = carried
        self._network = network
        self._deadlines = deadlines

    async def fetch_all(
        self, routes: Mapping[str, PartnerRoute], round_number: int
    ) -> tuple[dict[str, Shares], dict[str, str]]:
        """Return (shares of the partners that sent all of theirs in time, causes by partner
        whose share is missing).
        """
        fetched = await asyncio.gather(
            *(self._fetch(name, route, round_number) for name, route in routes.items())
        )
        by_name = dict(zip(routes, fetched, strict=True))
        shares = {name: share for name, share in by_name.items() if not isinstance(share, str)}
        return shares, {name: share for name, share in by_name.items() if isinstance(share, str)}

    async def _fetch(self, name: str, route: PartnerRoute, round_number: int) -> Shares | str:
        limit = self._deadlines.limit("gossip")
        started = loop_time()
        places = asyncio.Semaphore(TAKES_AT_ONCE)
        found = {}

        async def fetch(part: int) -> None:
            async with places:
                body = Take(round=round_number, part=part).encode()
                address = route.addresses[route.carriers[part]]
                reply = await self._network.messenger.call(
                    address, "take", body, timeout_seconds=limit, lane="bulk"
                )
                found[part] = await asyncio.to_thread(self._decode, name, part, reply)

        try:
            async with asyncio.timeout(limit), asyncio.TaskGroup() as tasks:
                for part in self._carried:
                    tasks.create_task(fetch(part))
        except TimeoutError:
            return f"its share did not come within {limit:.0f} s"
        except BaseExceptionGroup as group:
            error = first_cause(group)
            if not isinstance(error, TransportError):
                raise error from None
            return str(error)
        self._deadlines.observe("gossip", loop_time() - started)
        return found

    def _decode(self, name: str, part: int, reply: bytes) -> Share:
        """Decode a reply. Raises MessageError, and counts a rejection, for bytes that must not
        enter a mean.
        """
        try:
            return self.coding.decode(part, torch.frombuffer(bytearray(reply), dtype=torch.uint8))
        except MessageError as error:
            self._network.rejections.add(name, "payload", str(error))
            raise
