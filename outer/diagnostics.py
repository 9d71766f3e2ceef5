"""What an island answers to `diloco doctor`, so that a user sees what is wrong with a link before training over it.

    probe                       who answers, at what time
    probe_bytes  {num_bytes}    so many zero bytes                   (bulk lane)
    probe_sink   bytes          nothing: they are dropped            (bulk lane)
    dial_back    {address}      whether a `probe` at that address is answered

A doctor is no island: whoever knows the address, and the run's key if there is one, may ask. So each rank bounds what
it does for all of them together in a minute: nobody can use up its link, or search a network through it.
"""

import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from pydantic import Field

from outer.errors import DeadlineError, MessageError, PeerLost, TransportError
from outer.membership.base import Messenger
from outer.rounds import MAX_ROUND, Message, parse
from outer.transports.base import Endpoint
from outer.wire import VERSION

MAX_PROBE_BYTES = 8 << 20
"""Of one probe_bytes or probe_sink."""
BYTES_PER_MINUTE = 32 << 20
"""Each way; a doctor takes less than half of it."""
DIAL_BACKS_PER_MINUTE = 6
DIAL_BACK_SECONDS = 5.0
MAX_ADDRESS_LENGTH, MAX_CAUSE_LENGTH = 2048, 500
PACKAGES = ("diloco", "torch", "hivemind")

Text = Annotated[str, Field(max_length=64)]


class Greeting(Message):
    """Who answers a probe."""

    versions: dict[Text, Text] = Field(max_length=16)
    """Of python and of PACKAGES, by name."""
    wire: int
    """outer.wire.VERSION."""
    unix_time: float = Field(ge=0, lt=1e11)
    age_seconds: float = Field(ge=0, lt=1e11)
    """Since it began to answer."""
    config_hash: str = Field(max_length=64, pattern=r"^[0-9a-f]*$")
    round: int = Field(ge=0, lt=MAX_ROUND)


class BytesRequest(Message):
    num_bytes: int = Field(ge=1, le=MAX_PROBE_BYTES)


class DialRequest(Message):
    address: str = Field(min_length=1, max_length=MAX_ADDRESS_LENGTH, pattern=r"^[\x21-\x7e]+$")
    """A Messenger.address; a messenger reaches those of its own kind only."""


class DialResult(Message):
    cause: str = Field(max_length=MAX_CAUSE_LENGTH)
    """Empty: it was answered there."""


class Greeter:
    """Says who answers on one rank. `clock` gives unix time, `round_number` the rounds committed."""

    def __init__(
        self,
        config_hash: str = "",
        round_number: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config_hash, self._round, self._clock = config_hash, round_number, clock
        self._versions, self._began_at = versions(), time.monotonic()

    def greet(self, body: bytes) -> bytes:
        """The answer to a probe. Raises MessageError."""
        if body:
            raise MessageError(f"a probe with a body of {len(body)} bytes, none expected")
        greeting = Greeting(
            versions=self._versions,
            wire=VERSION,
            unix_time=self._clock(),
            age_seconds=time.monotonic() - self._began_at,
            config_hash=self._config_hash,
            round=self._round(),
        )
        return greeting.model_dump_json().encode()


class Probe:
    """Answers a doctor's calls on one rank."""

    def __init__(self, messenger: Messenger, greeter: Greeter) -> None:
        self._messenger, self._greeter = messenger, greeter
        self._sent, self._taken = Budget(BYTES_PER_MINUTE), Budget(BYTES_PER_MINUTE)
        self._dialled = Budget(DIAL_BACKS_PER_MINUTE)
        messenger.serve("probe", self._on_probe)
        messenger.serve("probe_bytes", self._on_bytes)
        messenger.serve("probe_sink", self._on_sink)
        messenger.serve("dial_back", self._on_dial_back)

    async def _on_probe(self, source: Endpoint, body: bytes) -> bytes:
        return self._greeter.greet(body)

    async def _on_bytes(self, source: Endpoint, body: bytes) -> bytes:
        num_bytes = parse(BytesRequest, body).num_bytes
        self._sent.spend(num_bytes, "bytes")
        return bytes(num_bytes)

    async def _on_sink(self, source: Endpoint, body: bytes) -> bytes:
        if not 1 <= len(body) <= MAX_PROBE_BYTES:
            raise MessageError(f"probe_sink with {len(body)} bytes; 1 to {MAX_PROBE_BYTES} are allowed")
        self._taken.spend(len(body), "bytes")
        return b""

    async def _on_dial_back(self, source: Endpoint, body: bytes) -> bytes:
        address = parse(DialRequest, body).address
        self._dialled.spend(1, "calls back")
        cause = ""
        try:
            reply = await self._messenger.call(address, "probe", b"", timeout_seconds=DIAL_BACK_SECONDS)
            parse(Greeting, reply)
        except DeadlineError:
            cause = f"no answer within {DIAL_BACK_SECONDS:g} s"
        except TransportError as error:
            cause = (error.cause if isinstance(error, PeerLost) else str(error)) or type(error).__name__
        return DialResult(cause=cause[:MAX_CAUSE_LENGTH]).model_dump_json().encode()


class Budget:
    """So much at once, and so much a minute in the long run, whoever asks."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._left, self._seen_at = float(per_minute), time.monotonic()

    def spend(self, amount: int, what: str) -> None:
        """Raise TransportError when there is not so much left."""
        now = time.monotonic()
        self._left = min(self._per_minute, self._left + (now - self._seen_at) * self._per_minute / 60)
        self._seen_at = now
        if amount > self._left:
            raise TransportError(f"more than {self._per_minute} {what} in a minute; ask again in a minute")
        self._left -= amount


def versions() -> dict[str, str]:
    """Of what an island runs on, by name; a package that is not there is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)[:64]
        except PackageNotFoundError:
            continue
    return found
