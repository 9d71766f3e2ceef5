"""Lets a decoder decode one input, and judges what it did: an undeclared error, time and memory are
findings.
"""

import re
import time

from tests.fuzz.entries import Entry
from tests.memory import own_peak

MOST_BYTES = 20_000_000
TRIES = 5
"""One of so many tries must keep within the limits: the machine may have other work, and memory is
collected late.
"""
OUTCOME_CHARACTERS = 60
_OF_THE_INPUT = re.compile(r"'[^']*'|\"[^\"]*\"|[0-9a-f]*\d[0-9a-f]*")


def judge(entry: Entry, body: bytes) -> str:
    """Decode the input. Returns what came of it in few words, and raises AssertionError if it
    breaks a promise.
    """
    began = time.process_time()
    outcome, grown = _decode_and_measure(entry, body)
    seconds = time.process_time() - began
    if seconds > entry.most_seconds:
        seconds = min(_seconds_of(entry, body) for _ in range(TRIES))
        assert seconds <= entry.most_seconds, (
            f"{len(body)} bytes took {1000 * seconds:.0f} ms of a processor"
        )
    if grown > MOST_BYTES:
        grown = min(_decode_and_measure(entry, body)[1] for _ in range(TRIES))
        assert grown <= MOST_BYTES, f"{len(body)} bytes took {grown / 1e6:.0f} MB"
    return outcome


def _decode(entry: Entry, body: bytes) -> str:
    try:
        entry.decode(body)
    except entry.errors as error:
        return (
            f"{type(error).__name__}: "
            f"{_OF_THE_INPUT.sub('', str(error)[:200])[:OUTCOME_CHARACTERS]}"
        )
    assert not entry.is_refused, "it was accepted, and nothing may be"
    return "decoded"


def _seconds_of(entry: Entry, body: bytes) -> float:
    began = time.process_time()
    _decode(entry, body)
    return time.process_time() - began


def _decode_and_measure(entry: Entry, body: bytes) -> tuple[str, int]:
    """Decode the input. Returns what came of it, and by how many bytes the process grew
    meanwhile.
    """
    peak = own_peak()
    before = peak.reset()
    outcome = _decode(entry, body)
    return outcome, peak.read() - before
