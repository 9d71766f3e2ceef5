"""How the endpoints of a gloo group learn each other's addresses: by calls of the island's messenger.

gloo asks a store for them. torch's own store listens on a port of its own and takes keys of any size from anybody; this
one has no port. What a peer sends is checked, because gloo reads it with native code that trusts it.
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
"""Limit for what gloo says of one endpoint: about 170 bytes, and 8 for each endpoint of the group."""
MAX_REPLY_BYTES = 3 * MAX_ADDRESS_BYTES
MAX_HOST_BYTES = 255
MAX_CALLERS = 4096
HOLD_SECONDS = 3600.0
"""A question waits for its answer while the caller waits; this only bounds the wait for a caller that went away."""


class AddressQuery(Message):
    """Body of `gloo_address` and `gloo_built`: a question about the callee's part in the group of an epoch."""

    epoch: str = Field(max_length=MAX_EPOCH_LENGTH)


class GlooAddress(Message):
    """Reply to `gloo_address`: what the callee's gloo says of itself."""

    key: str = Field(max_length=64)
    value: str = Field(max_length=2 * MAX_ADDRESS_BYTES, pattern=r"^([0-9a-f]{2})+$")


class AddressStore(dist.Store):
    """The store that gloo asks while it builds one group. gloo calls it on the thread that builds the group."""

    def __init__(self, num_endpoints: int, offer: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._num_endpoints, self._offer = num_endpoints, offer
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._cause: str | None = None
        self.own = b""
        """What this endpoint's gloo says of itself."""

    def set(self, key: str, value: bytes) -> None:
        self.own = bytes(value)
        self.put(key, self.own)
        self._offer(key, self.own)

    def get(self, key: str) -> bytes:
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all endpoints, not only for `keys`: gloo then connects to each in turn, and cannot be cancelled."""
        with self._changed:
            self._changed.wait_for(self._is_settled, None if timeout is None else timeout.total_seconds())
            if len(self._values) < self._num_endpoints:
                raise RuntimeError(self._cause or "endpoints are missing")

    def put(self, key: str, value: bytes) -> None:
        """Note the address of an endpoint. May be called on any thread."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def give_up(self, cause: str) -> None:
        """End gloo's waits with an error. May be called on any thread."""
        with self._changed:
            self._cause = cause
            self._changed.notify_all()

    def _is_settled(self) -> bool:
        return self._cause is not None or len(self._values) >= self._num_endpoints


class AddressExchange:
    """Answers the questions of other endpoints about this one, and asks them. Lives on the messenger's event loop."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._epoch = ""
        self._own: GlooAddress | None = None
        self._is_built = False
        self._asked: dict[tuple[Endpoint, str], str] = {}
        """The last epoch that a caller asked about, by caller and question; its earlier questions are over."""
        self._changed = ChangeSignal()
        messenger.serve("gloo_address", self._tell_address)
        messenger.serve("gloo_built", self._tell_built)

    def begin(self, epoch: str) -> None:
        """Begin the group of an epoch; answers about an earlier one end."""
        self._epoch, self._own, self._is_built = epoch, None, False
        self._changed.notify()

    def offer(self, epoch: str, key: str, value: bytes) -> None:
        """Tell those who ask what this endpoint's gloo says of itself."""
        if epoch == self._epoch:
            self._own = GlooAddress(key=key, value=value.hex())
            self._changed.notify()

    def end(self, epoch: str) -> None:
        """Note that this endpoint's group is built, or was given up."""
        if epoch == self._epoch:
            self._is_built = True
            self._changed.notify()

    async def ask(self, address: str, epoch: str, seconds: float) -> tuple[str, bytes]:
        """Wait until this endpoint and the one at `address` build the group, and return gloo's key and value of that.

        Raises as `Messenger.call`.
        """
        await self._changed.wait_until(lambda: self._own is not None or self._epoch != epoch, seconds)
        reply = await self._call(address, "gloo_address", epoch, seconds)
        found = await receive(GlooAddress, reply)
        return found.key, bytes.fromhex(found.value)

    async def wait_until_built(self, address: str, epoch: str, seconds: float) -> None:
        """Wait until the endpoint at `address` has built the group. Raises PeerLost when it dies."""
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

    async def _hold(self, source: Endpoint, question: str, body: bytes, is_ready: Callable[[], bool]) -> None:
        """Wait until the question can be answered. Raises MessageError once the caller has asked of another."""
        epoch = (await receive(AddressQuery, body)).epoch
        if (source, question) not in self._asked and len(self._asked) >= MAX_CALLERS:
            self._asked.pop(next(iter(self._asked)))
        self._asked[source, question] = epoch
        self._changed.notify()

        def is_over() -> bool:
            return self._asked.get((source, question)) != epoch

        await self._changed.wait_until(lambda: is_over() or (self._epoch == epoch and is_ready()), HOLD_SECONDS)
        if self._epoch != epoch or not is_ready():
            raise MessageError(f"it has not joined the group {epoch[:80]!r}")


def check_gloo_address(theirs: bytes, own: bytes, num_endpoints: int) -> None:
    """Raise MessageError unless what a peer's gloo says has the form of what this one's says.

        host length 8 | host | address length 8 | address | one id of 8 bytes for each endpoint

    gloo ends the process on some malformed values, so they must not reach it.
    """
    if (form := _parse(own, num_endpoints)) is None:  # another version of gloo: at least nothing is empty or huge
        if not 0 < len(theirs) <= MAX_ADDRESS_BYTES:
            raise MessageError(f"an address of gloo of {len(theirs)} bytes")
    elif _parse(theirs, num_endpoints) != form:
        raise MessageError(f"an address of gloo of {len(theirs)} bytes that is malformed")


def _parse(value: bytes, num_endpoints: int) -> int | None:
    """Size of the address in a value of gloo's, or None if the value does not have the form."""
    host_size = int.from_bytes(value[:8], "little")
    size = int.from_bytes(value[8 + host_size : 16 + host_size], "little")
    is_whole = len(value) == 16 + host_size + size + 8 * num_endpoints
    return size if is_whole and 0 < host_size <= MAX_HOST_BYTES and size > 0 else None
