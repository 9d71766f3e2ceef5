"""A mailbox for payloads that have arrived and have not been claimed. It is limited, so that no
peer fills memory.
"""

import asyncio
from collections.abc import Iterable

import torch

from outer.errors import MessageError, PeerLost, TransportError
from outer.network.endpoints import Endpoint, Tag
from outer.network.event_loop import ChangeSignal
from outer.network.rejections import RefusedError

MAX_UNCLAIMED_BYTES = 1 << 28
"""Limit per source. Beyond it the source's stream is not read until a payload is claimed."""
ENTRY_BYTES = 1 << 10
"""Memory that is counted per payload besides its bytes, because a peer may send any number of
empty payloads."""

Key = tuple[Endpoint, Tag]


class Mailbox:
    """The payloads of one group, by source and tag. Used on one event loop."""

    def __init__(
        self, sources: Iterable[Endpoint], max_unclaimed_bytes: int = MAX_UNCLAIMED_BYTES
    ) -> None:
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self._unclaimed_bytes = dict.fromkeys(sources, 0)
        self._arrived: dict[Key, torch.Tensor] = {}
        self._waiting: dict[Key, asyncio.Future[torch.Tensor]] = {}
        self._failures: dict[Endpoint, TransportError] = {}
        self._claimed = ChangeSignal()

    def put(self, source: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        """Deliver a payload. Raises MessageError if it is a duplicate or its source is not in the
        group.
        """
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
        self._unclaimed_bytes[source] += ENTRY_BYTES + payload.numel()

    async def wait_for_space(self, source: Endpoint) -> None:
        """Wait until `source` is within its limit of unclaimed bytes or has failed."""
        await self._claimed.wait_until(
            lambda: (
                self._unclaimed_bytes[source] <= self._max_unclaimed_bytes
                or source in self._failures
            )
        )

    async def get(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        """Wait for a payload and claim it. Raises MessageError if it has another size, or the error
        given to `fail`.
        """
        key = source, tag
        if source not in self._unclaimed_bytes:
            raise PeerLost(source.island, f"{source} is not in this group")
        if key in self._arrived:
            payload = self._arrived.pop(key)
            self._unclaimed_bytes[source] -= ENTRY_BYTES + payload.numel()
            self._claimed.notify()
        elif error := self.failure_of(source):
            raise error
        else:
            payload = await self._wait_for(key)
        if payload.numel() != num_bytes:
            raise MessageError(
                f"{source} sent {payload.numel()} bytes for {tag}, {num_bytes} expected"
            )
        return payload

    def fail(self, source: Endpoint, error: TransportError) -> None:
        """Mark `source` as failed. Waiting and later gets raise `error`, unless their payload has
        arrived.
        """
        if source in self._failures:
            return
        self._failures[source] = error
        for key in [key for key in self._waiting if key[0] == source]:
            waiting = self._waiting.pop(key)
            if not waiting.done():
                waiting.set_exception(_copy_error(error))
        self._claimed.notify()

    def fail_all(self, cause: str) -> None:
        for source in self._unclaimed_bytes:
            self.fail(source, PeerLost(source.island, cause))

    def failure_of(self, source: Endpoint) -> TransportError | None:
        """Return the error of a failed source, as a new exception, or None."""
        error = self._failures.get(source)
        return error and _copy_error(error)

    def raise_failure(self, sources: Iterable[Endpoint]) -> None:
        """Raise the error of the first of `sources` that has failed, if any."""
        for source in sources if self._failures else ():
            if error := self.failure_of(source):
                raise error

    async def _wait_for(self, key: Key) -> torch.Tensor:
        waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            return await waiting
        finally:
            if self._waiting.get(key) is waiting:
                del self._waiting[key]


def _copy_error(error: TransportError) -> TransportError:
    """Copy an error. One exception that is raised in many tasks would accumulate their
    tracebacks.
    """
    if isinstance(error, PeerLost):
        return PeerLost(error.peer, error.cause)
    if isinstance(error, RefusedError):
        return RefusedError(error.kind, str(error))
    return type(error)(*error.args)
