"""Payloads that have arrived and wait to be asked for, by source and tag. Bounded, so that no peer fills memory."""

import asyncio
from collections.abc import Iterable

import torch

from outer.errors import MessageError, PeerLost, TransportError
from outer.transports.base import Endpoint, Tag

MAX_UNCLAIMED_BYTES = 1 << 28
"""Per source. Over it the source's stream is not read on until something is claimed."""

Key = tuple[Endpoint, Tag]


class Mailbox:
    """One group's mailbox, used on one event loop."""

    def __init__(self, sources: Iterable[Endpoint], max_unclaimed_bytes: int = MAX_UNCLAIMED_BYTES) -> None:
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self._unclaimed_bytes = dict.fromkeys(sources, 0)
        self._arrived: dict[Key, torch.Tensor] = {}
        self._waiting: dict[Key, asyncio.Future[torch.Tensor]] = {}
        self._failures: dict[Endpoint, TransportError] = {}
        self._claimed = asyncio.Event()

    def put(self, source: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        """Deliver a payload. Raises MessageError when it came before or from outside of the group."""
        key = source, tag
        if source not in self._unclaimed_bytes:
            raise MessageError(f"a payload from {source}, which is not in this group")
        if key in self._arrived:
            raise MessageError(f"a second payload from {source} for {tag}")
        waiting = self._waiting.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(payload)
            return
        self._arrived[key] = payload
        self._unclaimed_bytes[source] += payload.numel()

    async def wait_for_space(self, source: Endpoint) -> None:
        """Return when less than the limit is unclaimed from `source`, or when it has failed."""
        while self._unclaimed_bytes[source] > self._max_unclaimed_bytes and source not in self._failures:
            self._claimed.clear()
            await self._claimed.wait()

    async def get(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        """The payload, waited for. Raises MessageError when it has another size, or what `fail` was given."""
        payload = await self._take(source, tag)
        if payload.numel() != num_bytes:
            raise MessageError(f"{source} sent {payload.numel()} bytes for {tag}, {num_bytes} expected")
        return payload

    def fail(self, source: Endpoint, error: TransportError) -> None:
        """Nothing more comes from `source`: waiting and later gets raise, unless their payload is here."""
        if source in self._failures:
            return
        self._failures[source] = error
        for key in [key for key in self._waiting if key[0] == source]:
            waiting = self._waiting.pop(key)
            if not waiting.done():
                waiting.set_exception(_again(error))
        self._claimed.set()

    def fail_all(self, cause: str) -> None:
        """As `fail`, for every source."""
        for source in self._unclaimed_bytes:
            self.fail(source, PeerLost(source.island, cause))

    def failure_of(self, source: Endpoint) -> TransportError | None:
        """Why nothing more comes from `source`, or None; a fresh exception each time."""
        error = self._failures.get(source)
        return error and _again(error)

    async def _take(self, source: Endpoint, tag: Tag) -> torch.Tensor:
        key = source, tag
        if source not in self._unclaimed_bytes:
            raise PeerLost(source.island, f"{source} is not in this group")
        if key in self._arrived:
            payload = self._arrived.pop(key)
            self._unclaimed_bytes[source] -= payload.numel()
            self._claimed.set()
            return payload
        if error := self.failure_of(source):
            raise error
        waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            return await waiting
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]


def _again(error: TransportError) -> TransportError:
    """A copy to raise: one exception raised in many tasks would gather their tracebacks."""
    if isinstance(error, PeerLost):
        return PeerLost(error.peer, error.cause)
    return type(error)(*error.args)
