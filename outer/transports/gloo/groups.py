"""Builds the gloo group of an epoch's endpoints, which exchange their addresses over their
messengers.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from outer.errors import DeadlineError, MessageError, PeerLost, TransportError, first_line
from outer.network.endpoints import ISLAND_NAME, Endpoint
from outer.network.event_loop import in_thread, loop_time
from outer.transports.gloo.addresses import AddressExchange, AddressStore, check_gloo_address
from outer.transports.gloo.door import close_door

MARGIN_SECONDS = 1.0
"""Extra time for gloo, because gloo's own error has more detail than a deadline."""
NOTICE_SECONDS = 0.2
"""When a group fails because an endpoint died, the connection to it breaks within this time and
identifies it.
"""
HostPort = tuple[str, int]
_ADDRESS = re.compile(
    rf"gloo:({ISLAND_NAME}/[0-9]{{1,4}})@([A-Za-z0-9.:-]{{1,253}}):([0-9]{{1,5}})"
)


@dataclass(frozen=True)
class GroupSpec:
    """The specification of a group to be built, for one of its endpoints."""

    epoch: str
    me: Endpoint
    addresses: Mapping[Endpoint, HostPort]
    """Addresses of the messengers of all endpoints."""
    listen_host: str
    seconds: float
    """Longest wait for the other endpoints."""


async def build_group(spec: GroupSpec, exchange: AddressExchange) -> dist.ProcessGroupGloo:
    """Wait until all endpoints have joined, and build their group.

    Raises PeerLost as soon as an endpoint is unreachable or dies, and DeadlineError, which names
    the late endpoints.
    """
    loop = asyncio.get_running_loop()
    exchange.begin(spec.epoch)

    def offer(key: str, value: bytes) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has been closed
            loop.call_soon_threadsafe(exchange.offer, spec.epoch, key, value)

    store = AddressStore(len(spec.addresses), offer)
    building = asyncio.create_task(in_thread(lambda: _build(spec, store)))
    building.add_done_callback(lambda task: task.cancelled() or task.exception())
    asking = {
        e: asyncio.create_task(_ask(spec, e, exchange, store))
        for e in spec.addresses
        if e != spec.me
    }
    try:
        return await _first_result(spec, building, asking)
    finally:
        exchange.end(spec.epoch)
        store.give_up("the group was given up")
        for task in asking.values():
            task.cancel()
        # The thread ends now unless it is within gloo. If it returned while the process ends, gloo
        # would abort.
        await asyncio.wait({building}, timeout=NOTICE_SECONDS)
        building.cancel()


def parse_address(endpoint: Endpoint, address: str) -> HostPort:
    """Parse an endpoint's address, `gloo:<island>/<rank>@host:port`, where its messenger listens.
    Raises PeerLost.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or found[1] != str(endpoint) or not 0 < int(found[3]) < 65536:
        raise PeerLost(
            endpoint.island, f"its record holds a malformed address of {endpoint}: {address[:80]!r}"
        )
    return found[2], int(found[3])


async def _first_result(
    spec: GroupSpec,
    building: "asyncio.Task[dist.ProcessGroupGloo]",
    asking: "Mapping[Endpoint, asyncio.Task[None]]",
) -> dist.ProcessGroupGloo:
    """Return the group, or raise the error of the first lost endpoint. An endpoint's task ends
    early only with an error.
    """
    deadline = loop_time() + spec.seconds + MARGIN_SECONDS
    pending: set[asyncio.Task] = {building, *asking.values()}
    while not building.done() and not any(map(_has_failed, asking.values())):
        left = deadline - loop_time()
        done, pending = await asyncio.wait(
            pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            break
    if building.done() and building.exception() is not None and asking:
        await asyncio.wait(
            asking.values(), timeout=NOTICE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
    if building.done() and building.exception() is None:
        return building.result()
    for lost in filter(_has_failed, asking.values()):
        lost.result()  # raises
    if building.done():
        return building.result()  # raises
    raise _not_built(spec, "no answer")


def _has_failed(task: "asyncio.Task[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


async def _ask(
    spec: GroupSpec, endpoint: Endpoint, exchange: AddressExchange, store: AddressStore
) -> None:
    """Put the address data of an endpoint into the store, and return when the endpoint has built
    the group, too.
    """
    host, port = spec.addresses[endpoint]
    address = f"{host}:{port}"
    try:
        key, value = await exchange.ask(address, spec.epoch, spec.seconds)
        rank = sorted(spec.addresses).index(endpoint)
        if key.rpartition("/")[2] != str(rank):
            raise MessageError(
                f"got an address for the key {key!r}, expected a key that ends in /{rank}"
            )
        check_gloo_address(value, store.own, len(spec.addresses))
        store.put(key, value)
        await exchange.wait_until_built(address, spec.epoch, spec.seconds)
    except PeerLost as error:
        is_dead = "cannot be reached" in error.cause
        what = "cannot be reached" if is_dead else "disconnected before the group was built"
        raise PeerLost(endpoint.island, f"{endpoint} {what}: {error.cause}") from None
    except DeadlineError:
        raise _not_built(spec, f"{endpoint} did not join") from None
    except MessageError as error:
        raise PeerLost(endpoint.island, f"{endpoint}: {error}") from None


def _build(spec: GroupSpec, store: AddressStore) -> dist.ProcessGroupGloo:
    """Build the group. Blocks until all endpoints have joined. Raises DeadlineError for any
    error of gloo.
    """
    endpoints = sorted(spec.addresses)
    try:
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        # All pairs connect at once, although gloo may connect large groups lazily, so that an
        # unreachable peer is found here.
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=spec.listen_host, lazy_init=False)
        ]
        options._timeout = timedelta(seconds=spec.seconds)
        options._threads = 1
        group = dist.ProcessGroupGloo(store, endpoints.index(spec.me), len(endpoints), options)
    except TransportError:
        raise
    except Exception as error:  # noqa: BLE001 - gloo raises RuntimeError, ValueError, MemoryError and IndexError
        raise _not_built(spec, f"{type(error).__name__}: {first_line(error)}") from None
    close_door(store.own)
    return group


def _not_built(spec: GroupSpec, cause: str) -> DeadlineError:
    return DeadlineError(
        f"the group {spec.epoch!r} was not built within {spec.seconds:g} s: {cause}"
    )
