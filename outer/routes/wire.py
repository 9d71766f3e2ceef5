"""Messages between islands and relays before a relay forwards bytes. They are short, and each is
checked on arrival.

magic 4 | version 1 | kind 1 | length 2 | a Message as JSON

to register, and then to be called          to reach a registered rank
island -> relay   REGISTER key, rank        dialer -> relay   DIAL key, rank, door
relay -> island   CHALLENGE nonce           relay -> dialer   JOINED, or REFUSED with the reason
island -> relay   PROOF                     then the bytes of both ends, unchanged
relay -> island   REGISTERED
island -> relay   PING                      to take a dialer, on a new connection
relay -> island   PONG, INCOMING token      island -> relay   ANSWER token
                                            relay -> island   JOINED
"""

import asyncio
import socket
import struct
from typing import TypeVar

from pydantic import Field

from outer.identity.island_key import PublicKey, Signature
from outer.network.messages import MAX_RANKS, Message, parse
from outer.network.rejections import RefusedError, printable
from outer.network.run_key import RunKey
from outer.routes.addresses import Door
from outer.routes.sockets import read_exactly

MAGIC = b"DLRY"
VERSION = 1
MAX_BYTES = 1024
_HEADER = struct.Struct("!4sBBH")
PING_SECONDS = 10.0
SILENT_SECONDS = 30.0
"""Interval of an island's pings to its relays, and the silence after which either side closes
the connection."""
OPENING_SECONDS = 5.0
"""Longest time in which a new connection to a relay must send its request and prove it."""
ANSWER_SECONDS = 5.0
"""Longest time in which an island must connect to its relay when a dialer waits."""


class Register(Message):
    """Request of a rank of the island with this key to be registered, and to be notified of
    dialers.
    """

    key: PublicKey
    rank: int = Field(ge=0, lt=MAX_RANKS)


class Challenge(Message):
    nonce: str = Field(max_length=32, pattern=r"^[0-9a-f]{32}$")


class Proof(Message):
    signature: Signature
    mac: str = Field(max_length=64, pattern=r"^([0-9a-f]{64})?$")
    """MAC under the run key, or empty if there is no run key."""


class Registered(Message):
    pass


class Ping(Message):
    pass


class Pong(Message):
    pass


class Incoming(Message):
    """Notice that a dialer waits for this rank. The rank must answer with the token on a new
    connection.
    """

    token: str = Field(max_length=32, pattern=r"^[0-9a-f]{32}$")
    door: Door


class Dial(Message):
    """Request to be connected to this rank of the island with this key."""

    key: PublicKey
    rank: int = Field(ge=0, lt=MAX_RANKS)
    door: Door


class Answer(Message):
    token: str = Field(max_length=32, pattern=r"^[0-9a-f]{32}$")


class Joined(Message):
    """Notice that all further bytes come from the other end."""


class Refused(Message):
    text: str = Field(max_length=400)


KINDS: tuple[type[Message], ...] = (
    Register, Challenge, Proof, Registered, Ping, Pong, Incoming, Dial, Answer, Joined, Refused,
)  # fmt: skip
M = TypeVar("M", bound=Message)


async def send(connection: socket.socket, message: Message) -> None:
    """Send one message. Raises OSError."""
    body = message.encode()
    raw = _HEADER.pack(MAGIC, VERSION, KINDS.index(type(message)), len(body)) + body
    await asyncio.get_running_loop().sock_sendall(connection, raw)


async def receive(connection: socket.socket, *expected: type[M]) -> M:
    """Read exactly one message. The caller limits the time.

    Raises MessageError if it is malformed or not of an expected type, ConnectionRefusedError with
    the other side's text if it refuses, and OSError.
    """
    magic, version, kind, length = _HEADER.unpack(await read_exactly(connection, _HEADER.size))
    if magic != MAGIC:
        raise RefusedError("header", f"not a message of a relay: it begins with {magic.hex()}")
    if version != VERSION:
        raise RefusedError(
            "version",
            f"a relay's message of version {version}, {VERSION} expected: use one release",
        )
    if kind >= len(KINDS) or length > MAX_BYTES:
        raise RefusedError(
            "header", f"a relay's message of kind {kind} and {length} bytes, at most {MAX_BYTES}"
        )
    message = parse(KINDS[kind], await read_exactly(connection, length))
    if isinstance(message, Refused) and Refused not in expected:
        raise ConnectionRefusedError(printable(message.text, MAX_BYTES))
    if not isinstance(message, expected):
        names = " or ".join(each.__name__ for each in expected)
        raise RefusedError("header", f"{type(message).__name__} where {names} was expected")
    return message


def proof_body(challenge: Challenge, register: Register) -> bytes:
    """Return the bytes that an island signs to register."""
    return challenge.encode() + register.encode()


def registration_mac(run_key: RunKey | None, body: bytes) -> str:
    """Return the MAC that proves that an island holds the run key, in hexadecimal digits, or ""
    without a run key.
    """
    return run_key.derive("relay", body).hex() if run_key is not None else ""


REGISTRATION = "registration at a relay"
"""Purpose of the signature of a registration."""
