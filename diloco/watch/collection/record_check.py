"""Check records that a peer has sent, and decide which of them are kept."""

import math
from collections.abc import Sequence

from pydantic import ValidationError

from diloco.records.metrics import (
    EventRecord,
    PauseRecord,
    Record,
    RoundRecord,
    StepRecord,
    TrafficRecord,
)
from diloco.records.run_folder import parse_record

MAX_NAMES = 4096
MAX_NAME = 64
MAX_TEXT = 2000
MAX_INTEGER = 1 << 62
PAST_SECONDS = 400 * 86400.0
FUTURE_SECONDS = 3600.0
"""Records whose time differs from now by more than this are dropped, because one would stretch
every time axis."""


def check_record(line: str, now: float) -> Record | None:
    """Return the record in a line from a peer; None if it is invalid or cannot be from before the
    unix time `now`.
    """
    try:
        record = parse_record(line.encode())
    except (ValidationError, ValueError):
        return None
    is_sane = -PAST_SECONDS < record.time - now < FUTURE_SECONDS and all(
        map(is_bounded, vars(record).values())
    )
    match record:
        case StepRecord():
            is_sane &= are_names(list(record.source_tokens))
        case RoundRecord():
            is_sane &= are_names([*record.participants, *record.listeners]) and are_names(
                list(record.gated)
            )
        case EventRecord():
            is_sane &= len(record.name) <= MAX_NAME
        case PauseRecord():
            is_sane &= len(record.name) <= MAX_NAME
        case TrafficRecord():
            is_sane &= are_names([*record.sent, *record.planned])
    return record if is_sane else None


def is_bounded(value: object) -> bool:
    """Return whether a record's field has at most the length and size of an honest field, and no
    number is inf or nan.
    """
    if isinstance(value, dict):
        return all(map(is_bounded, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_bounded, value))
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return not isinstance(value, int) or abs(value) < MAX_INTEGER


def are_names(names: Sequence[str]) -> bool:
    """Return whether a list has at most as many names as a run may have islands or sources, each of
    allowed length.
    """
    return len(names) <= MAX_NAMES and all(len(name) <= MAX_NAME for name in names)
