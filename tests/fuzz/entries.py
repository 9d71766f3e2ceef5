"""What is fuzzed: a decoder of bytes from a peer, with inputs that it accepts and the errors that
it declares.

An input is a line with the name of its entry, and then the bytes for the decoder. So the inputs of
a group share one corpus, and a new entry changes nothing about those that are there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from outer.errors import MessageError

EVENT_LOOP_SECONDS = 0.02
"""Most time of a processor that one input may take, as it may be taken from the event loop."""


@dataclass(frozen=True)
class Entry:
    """A decoder of bytes from a peer."""

    decode: Callable[[bytes], object]
    """Decodes the bytes, and asserts what must hold of the result."""
    seeds: Sequence[bytes]
    """Inputs that it accepts, made by our own encoders."""
    errors: tuple[type[Exception], ...] = (MessageError,)
    """Those that it declares. Anything else is a finding."""
    is_json: bool = False
    """Whether its inputs are JSON, whose values are changed one by one."""
    most_seconds: float = EVENT_LOOP_SECONDS
    is_refused: bool = field(default=False, kw_only=True)
    """Whether no input is accepted, as by a handshake without a fresh proof."""


Entries = Mapping[str, Entry]


def join(name: str, body: bytes) -> bytes:
    """The input of a group for the entry with this name."""
    return name.encode() + b"\n" + body


def split(entries: Entries, data: bytes) -> tuple[str, bytes]:
    """The name of an entry and the bytes for it. Input that names none is for the one on which its
    hash falls.
    """
    line, newline, body = data.partition(b"\n")
    name = line.decode(errors="replace")
    if newline and name in entries:
        return name, body
    names = sorted(entries)
    return names[crc32(line) % len(names)], body


def seeds_of(entries: Entries) -> list[bytes]:
    """The seeds of all entries as inputs of the group."""
    return [join(name, seed) for name, entry in entries.items() for seed in entry.seeds]
