"""A transport over gloo: plain TCP between all endpoints, fast and unencrypted, for clusters that
trust each other.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outer.errors import PeerLost, first_line
from outer.network.endpoints import MAX_PAYLOAD_BYTES, Endpoint, Messenger, Tag, Traffic
from outer.network.event_loop import WaitingThreads, in_thread
from outer.network.frames import check_payload
from outer.space.buffers import BUFFERS
from outer.transports.gloo.addresses import AddressExchange
from outer.transports.gloo.door import check_listen_host
from outer.transports.gloo.groups import GroupSpec, build_group, parse_address
from outer.transports.gloo.open_files import allow_many_files

MAX_WAIT = timedelta(days=1)
"""Limit for one gloo call. The actual deadline is the caller's, which disconnects when it
passes."""
PREAMBLE_BYTES = 48
"""Size of gloo's header. A payload takes three messages: sender ready, receiver ready, and the
payload itself.
"""
SENDS_IN_FLIGHT = 2
"""Limit per endpoint. Permissions for the other endpoint's sends use the same connection and
queue behind this one's pending sends."""


class GlooTransport:
    """A Transport (outer.transports.base) over gloo. The first error ends an epoch's process group
    for good.
    """

    is_uneven = True

    def __init__(
        self,
        me: Endpoint,
        messenger: Messenger,
        traffic: Traffic,
        listen_host: str,
        connect_seconds: float,
    ) -> None:
        check_listen_host(listen_host)
        allow_many_files()  # Strangers may connect while a group is built.
        self.max_payload_bytes = (
            MAX_PAYLOAD_BYTES  # gloo delivers into buffers of the expected size only
        )
        self.traffic = traffic
        self.address = f"gloo:{me}@{messenger.address}"
        self._me = me
        self._listen_host = listen_host
        self._connect_seconds = connect_seconds
        self._exchange = AddressExchange(messenger)
        self._group: Any = None  # a ProcessGroupGloo; its stubs lack send and recv
        self._ranks: dict[Endpoint, int] = {}
        self._sending: dict[Endpoint, asyncio.Semaphore] = {}
        self._waiters = WaitingThreads()

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await self.disconnect()
        endpoints = sorted(addresses)
        places = {endpoint: parse_address(endpoint, addresses[endpoint]) for endpoint in endpoints}
        spec = GroupSpec(epoch, self._me, places, self._listen_host, self._connect_seconds)
        self._group = await build_group(spec, self._exchange)
        self._ranks = {endpoint: rank for rank, endpoint in enumerate(endpoints)}
        self._sending = {endpoint: asyncio.Semaphore(SENDS_IN_FLIGHT) for endpoint in endpoints}

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        group, rank = self._locate(to)
        num_bytes = check_payload(payload).numel()
        async with self._sending[to]:
            await self._wait(
                to, lambda: group.send([_non_empty(payload)], rank, gloo_tag(tag, num_bytes))
            )
        self.traffic.bytes_sent += num_bytes + 2 * PREAMBLE_BYTES
        self.traffic.bytes_received += PREAMBLE_BYTES

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        group, rank = self._locate(source)
        payload = BUFFERS.bytes(num_bytes)
        await self._wait(
            source, lambda: group.recv([_non_empty(payload)], rank, gloo_tag(tag, num_bytes))
        )
        self.traffic.bytes_received += num_bytes + 2 * PREAMBLE_BYTES
        self.traffic.bytes_sent += PREAMBLE_BYTES
        return payload

    async def disconnect(self) -> None:
        group = self._group
        ranks = self._ranks
        self._group = None
        self._ranks = {}
        if group is not None:
            await in_thread(
                lambda: _break_pairs(group, [r for e, r in ranks.items() if e != self._me])
            )

    async def close(self) -> None:
        await self.disconnect()
        self._waiters.close()

    def _locate(self, other: Endpoint) -> tuple[Any, int]:
        if self._group is None or other not in self._ranks:
            raise PeerLost(other.island, f"{other} is not in this group")
        return self._group, self._ranks[other]

    async def _wait(self, other: Endpoint, start: Callable[[], dist.Work]) -> None:
        try:
            work = start()
            await in_thread(lambda: work.wait(MAX_WAIT), self._waiters.start)
        except Exception as error:  # noqa: BLE001 - gloo raises RuntimeError, ValueError, MemoryError and IndexError
            raise PeerLost(other.island, first_line(error)) from None


def gloo_tag(tag: Tag, num_bytes: int) -> int:
    """Hash a tag to gloo's 31 bits: 2 for round and attempt, 1 for the leg, 20 for the part, 8 for
    the size.

    Rounds of a group follow one another, so two bits distinguish neighbouring rounds. The size is
    included because gloo ends the process when a message is longer than its buffer. So a payload of
    another size is never delivered.
    """
    turn = (tag.round + tag.attempt) % 4
    return turn << 29 | tag.leg << 28 | (tag.part % (1 << 20)) << 8 | num_bytes % 251


def _non_empty(payload: torch.Tensor) -> torch.Tensor:
    """Return the payload, or one byte in place of an empty payload, because gloo sends no empty
    messages.
    """
    return payload if payload.numel() else torch.zeros(1, dtype=torch.uint8)


def _break_pairs(group: Any, ranks: list[int]) -> None:
    """Close every connection of the group, so that all waits on them fail at once on both sides.

    gloo has no other way to cancel: a wait that times out closes its pair, which fails all waits on
    the pair.
    """
    for rank in ranks:
        with contextlib.suppress(Exception):
            group.recv([torch.empty(1, dtype=torch.uint8)], rank, (1 << 31) - 1).wait(
                timedelta(milliseconds=1)
            )
