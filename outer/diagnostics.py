"""Serves the calls of `diloco doctor`, which finds problems of a link before a run uses it.

    call         body           reply
    probe        empty          versions, time, config hash and round of the island
    probe_bytes  {num_bytes}    `num_bytes` zero bytes                    (bulk lane)
    probe_sink   bytes          empty; the bytes are dropped              (bulk lane)
    dial_back    {address}      whether a `probe` at that address is answered

A doctor is not an island: any program that knows the address, and the run key if there is one, may
call. Each rank therefore limits its replies per minute, to protect its link. It dials back only the
host of the caller, so that it cannot be used to scan a network.
"""

import platform
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from outer.errors import DeadlineError, MessageError, TransportError, first_line
from outer.network.callers import address_of_caller
from outer.network.endpoints import Endpoint, Messenger
from outer.network.frames import VERSION
from outer.network.messages import MAX_ROUND, Message, call_message, receive
from outer.packages import MAX_VERSION_LENGTH, find_version

MAX_PROBE_BYTES = 8 << 20
"""Limit for the bytes of one probe_bytes or probe_sink call."""
BYTES_PER_MINUTE = 32 << 20
"""Limit for the bytes per minute in each direction. A doctor needs less than half of it."""
DIAL_BACKS_PER_MINUTE = 6
DIAL_BACK_SECONDS = 5.0
MAX_ADDRESS_LENGTH = 2048
MAX_CAUSE_LENGTH = 500
PACKAGES = ("diloco", "torch", "hivemind")

ShortText = Annotated[str, Field(max_length=MAX_VERSION_LENGTH)]


class ProbeReply(Message):
    """The reply to a probe."""

    versions: dict[ShortText, ShortText] = Field(max_length=16)
    wire: int = Field(ge=0, lt=256)
    """Version of the frame format (outer.network.frames.VERSION)."""
    unix_time: float = Field(ge=0, lt=1e11)
    age_seconds: float = Field(ge=0, lt=1e11)
    """Time in seconds since the rank began to answer."""
    config_hash: str = Field(max_length=64, pattern=r"^[0-9a-f]*$")
    round: int = Field(ge=0, lt=MAX_ROUND)


class BytesRequest(Message):
    """Body of a probe_bytes call."""

    num_bytes: int = Field(ge=1, le=MAX_PROBE_BYTES)


class DialRequest(Message):
    """Body of a dial_back call."""

    address: str = Field(min_length=1, max_length=MAX_ADDRESS_LENGTH, pattern=r"^[\x21-\x7e]+$")
    """A Messenger.address. A messenger can reach only addresses of its own kind."""


class DialResult(Message):
    """Reply to a dial_back call."""

    cause: str = Field(max_length=MAX_CAUSE_LENGTH)
    """Reason why the address did not answer, or empty if it did."""


class ProbeResponder:
    """Answers probes on one rank. `clock` returns unix time, `round_number` the number of committed
    rounds.
    """

    def __init__(
        self,
        config_hash: str = "",
        round_number: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config_hash = config_hash
        self._round = round_number
        self._clock = clock
        self._versions = package_versions()
        self._began_at = time.monotonic()

    def respond(self, body: bytes) -> bytes:
        """Encode the reply to a probe. Raises MessageError if the probe has a body."""
        if body:
            raise MessageError(f"a probe has a body of {len(body)} bytes, none expected")
        now = {
            "unix_time": self._clock(),
            "age_seconds": time.monotonic() - self._began_at,
            "round": self._round(),
        }
        return ProbeReply(
            versions=self._versions, wire=VERSION, config_hash=self._config_hash, **now
        ).encode()


class DiagnosticsServer:
    """Answers the calls of doctors on one rank."""

    def __init__(self, messenger: Messenger, responder: ProbeResponder) -> None:
        self._messenger = messenger
        self._responder = responder
        self._sent = Budget(BYTES_PER_MINUTE)
        self._received = Budget(BYTES_PER_MINUTE)
        self._dial_backs = Budget(DIAL_BACKS_PER_MINUTE)
        messenger.serve("probe", self._on_probe)
        messenger.serve("probe_bytes", self._on_probe_bytes)
        messenger.serve("probe_sink", self._on_probe_sink)
        messenger.serve("dial_back", self._on_dial_back)

    async def _on_probe(self, source: Endpoint, body: bytes) -> bytes:
        return self._responder.respond(body)

    async def _on_probe_bytes(self, source: Endpoint, body: bytes) -> bytes:
        num_bytes = (await receive(BytesRequest, body)).num_bytes
        self._sent.spend(num_bytes, "bytes")
        return bytes(num_bytes)

    async def _on_probe_sink(self, source: Endpoint, body: bytes) -> bytes:
        if not 1 <= len(body) <= MAX_PROBE_BYTES:
            raise MessageError(
                f"probe_sink with {len(body)} bytes; 1 to {MAX_PROBE_BYTES} are allowed"
            )
        self._received.spend(len(body), "bytes")
        return b""

    async def _on_dial_back(self, source: Endpoint, body: bytes) -> bytes:
        request = await receive(DialRequest, body)
        self._dial_backs.spend(1, "calls back")
        address = await address_of_caller(request.address)
        cause = ""
        try:
            await call_message(
                self._messenger,
                address,
                "probe",
                None,
                ProbeReply,
                timeout_seconds=DIAL_BACK_SECONDS,
            )
        except DeadlineError:
            cause = f"no answer within {DIAL_BACK_SECONDS:g} s"
        except TransportError as error:
            cause = first_line(error)
        return DialResult(cause=cause).encode()


class Budget:
    """A token bucket: at most `per_minute` at once, and at most `per_minute` per minute in the long
    run.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._seen_at = time.monotonic()

    def spend(self, amount: int, what: str) -> None:
        """Take `amount` out of the budget. Raises TransportError, which contains `what`, if less
        is left.
        """
        now = time.monotonic()
        self._left = min(
            self._per_minute, self._left + (now - self._seen_at) * self._per_minute / 60
        )
        self._seen_at = now
        if amount > self._left:
            raise TransportError(
                f"more than {self._per_minute} {what} in a minute; ask again in a minute"
            )
        self._left -= amount


def package_versions() -> dict[str, str]:
    """Return the versions of python and of PACKAGES, by name. Packages that are not installed
    are left out.
    """
    found = {package: find_version(package) for package in PACKAGES}
    return {"python": platform.python_version()} | {
        name: number for name, number in found.items() if number
    }
