"""Exchange of addresses between the endpoints of a gloo group, by calls of the island's messenger.

gloo requests them from a store. torch's own store listens on a port of its own and accepts keys of
any size from any host; this store has no port. Peers' data are checked, because gloo reads them
with native code that trusts them.
"""

import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from pydantic import Field

from outer.errors import MessageError
from outer.network.endpoints import Endpoint, Messenger
from outer.network.event_loop import ChangeSignal
from outer.network.messages import Message, receive

MAX_EPOCH_LENGTH = 1024
MAX_ADDRESS_BYTES = 1 << 16
"""Limit for gloo's address data of one endpoint, which is about 170 bytes plus 8 per endpoint of
the group."""
MAX_REPLY_BYTES = 3 * MAX_ADDRESS_BYTES
MAX_HOST_BYTES = 255
MAX_CALLERS = 4096
HOLD_SECONDS = 3600.0
"""A request waits for its answer as long as the caller waits. This limit applies if the caller
has disconnected."""


class AddressQuery(Message):
    """Body of `gloo_address` and `gloo_built`: a request about the callee's part in the group of
    an epoch.
    """

    epoch: str = Field(max_length=MAX_EPOCH_LENGTH)


class GlooAddress(Message):
    """Reply to `gloo_address`: the address data of the callee's gloo."""

    key: str = Field(max_length=64)
    value: str = Field(max_length=2 * MAX_ADDRESS_BYTES, pattern=r"^([0-9a-f]{2})+$")


class AddressStore(dist.Store):
    """The store that gloo reads while it builds one group. gloo calls it on the thread that
    builds the group.
    """

    def __init__(self, num_endpoints: int, offer: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._num_endpoints = num_endpoints
        self._offer = offer
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._cause: str | None = None
        self.own = b""
        """The address data of this endpoint's gloo."""

    def set(self, key: str, value: bytes) -> None:
        self.own = bytes(value)
        self.put(key, self.own)
        self._offer(key, self.own)

    def get(self, key: str) -> bytes:
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all endpoints, not only for `keys`, because gloo then connects to each in
        turn and cannot be cancelled.
        """
        with self._changed:
            self._changed.wait_for(
                self._is_settled, None if timeout is None else timeout.total_seconds()
            )
            if len(self._values) < self._num_endpoints:
                raise RuntimeError(self._cause or "endpoints are missing")

    def put(self, key: str, value: bytes) -> None:
        """Store the address data of an endpoint. Any thread may call it."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def give_up(self, cause: str) -> None:
        """End gloo's waits with an error. Any thread may call it."""
        with self._changed:
            self._cause = cause
            self._changed.notify_all()

    def _is_settled(self) -> bool:
        return self._cause is not None or len(self._values) >= self._num_endpoints


class AddressExchange:
    """Answers the requests of other endpoints about this one, and requests theirs. Used on the
    messenger's event loop.
    """

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._epoch = ""
        self._own: GlooAddress | None = None
        self._is_built = False
        self._asked: dict[tuple[Endpoint, str], str] = {}
        """The last epoch that a caller requested, by caller and request; its earlier requests
        are over."""
        self._changed = ChangeSignal()
        messenger.serve("gloo_address", self._tell_address)
        messenger.serve("gloo_built", self._tell_built)

    def begin(self, epoch: str) -> None:
        """Begin the group of an epoch. Pending answers about an earlier group end."""
        self._epoch = epoch
        self._own = None
        self._is_built = False
        self._changed.notify()

    def offer(self, epoch: str, key: str, value: bytes) -> None:
        """Provide the address data of this endpoint's gloo to endpoints that request them."""
        if epoch == self._epoch:
            self._own = GlooAddress(key=key, value=value.hex())
            self._changed.notify()

    def end(self, epoch: str) -> None:
        """Record that this endpoint's group was built or abandoned."""
        if epoch == self._epoch:
            self._is_built = True
            self._changed.notify()

    async def ask(self, address: str, epoch: str, seconds: float) -> tuple[str, bytes]:
        """Wait until this endpoint and the one at `address` build the group. Return the other's key
        and value for gloo's store.

        Raises like `Messenger.call`.
        """
        await self._changed.wait_until(
            lambda: self._own is not None or self._epoch != epoch, seconds
        )
        reply = await self._call(address, "gloo_address", epoch, seconds)
        found = await receive(GlooAddress, reply)
        return found.key, bytes.fromhex(found.value)

    async def wait_until_built(self, address: str, epoch: str, seconds: float) -> None:
        """Wait until the endpoint at `address` has built the group. Raises PeerLost when it
        dies.
        """
        await self._call(address, "gloo_built", epoch, seconds)

    async def _call(self, address: str, kind: str, epoch: str, seconds: float) -> bytes:
        body = AddressQuery(epoch=epoch).encode()
        return await self._messenger.call(
            address, kind, body, timeout_seconds=seconds, lane="bulk", longest=MAX_REPLY_BYTES
        )

    async def _tell_address(self, source: Endpoint, body: bytes) -> bytes:
        await self._hold(source, "address", body, lambda: self._own is not None)
        assert self._own is not None
        return self._own.encode()

    async def _tell_built(self, source: Endpoint, body: bytes) -> bytes:
        await self._hold(source, "built", body, lambda: self._is_built)
        return b""

    async def _hold(
        self, source: Endpoint, question: str, body: bytes, is_ready: Callable[[], bool]
    ) -> None:
        """Wait until the request can be answered. Raises MessageError once the caller has
        requested another epoch.
        """
        epoch = (await receive(AddressQuery, body)).epoch
        if (source, question) not in self._asked and len(self._asked) >= MAX_CALLERS:
            self._asked.pop(next(iter(self._asked)))
        self._asked[source, question] = epoch
        self._changed.notify()

        def is_over() -> bool:
            return self._asked.get((source, question)) != epoch

        await self._changed.wait_until(
            lambda: is_over() or (self._epoch == epoch and is_ready()), HOLD_SECONDS
        )
        if self._epoch != epoch or not is_ready():
            raise MessageError(f"it has not joined the group {epoch[:80]!r}")


def check_gloo_address(theirs: bytes, own: bytes, num_endpoints: int) -> None:
    """Raise MessageError unless the address data of a peer's gloo have the same form as this one's.

        host length 8 | host | address length 8 | address | one id of 8 bytes for each endpoint

    gloo ends the process on some malformed values, so they must not reach it.
    """
    if (
        form := _parse(own, num_endpoints)
    ) is None:  # another version of gloo: check at least the size
        if not 0 < len(theirs) <= MAX_ADDRESS_BYTES:
            raise MessageError(f"an address of gloo of {len(theirs)} bytes")
    elif _parse(theirs, num_endpoints) != form:
        raise MessageError(f"an address of gloo of {len(theirs)} bytes that is malformed")


def _parse(value: bytes, num_endpoints: int) -> int | None:
    """Return the size of the address in gloo's address data, or None if the data do not have the
    expected form.
    """
    host_size = int.from_bytes(value[:8], "little")
    size = int.from_bytes(value[8 + host_size : 16 + host_size], "little")
    is_whole = len(value) == 16 + host_size + size + 8 * num_endpoints
    return size if is_whole and 0 < host_size <= MAX_HOST_BYTES and size > 0 else None
