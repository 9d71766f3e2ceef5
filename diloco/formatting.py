"""Formats and parses numbers with units for people. Units are decimal, as in link rates: 1 MB is
10^6 bytes.
"""

import math
import re
from collections.abc import Mapping, Sequence

from diloco.errors import ConfigError

UNKNOWN = "-"
BIT_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def human_count(value: float | None) -> str:
    """Format `1234567` as `1.23M`."""
    return UNKNOWN if value is None else _scaled(value, ("", "k", "M", "B", "T"), "")


def human_bytes(value: float | None) -> str:
    """Format `1234567` as `1.23 MB`."""
    return UNKNOWN if value is None else _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"), " ")


def human_seconds(value: float | None) -> str:
    """Format `3723` as `1 h 02 min`, and times under ten minutes as seconds."""
    if value is None:
        return UNKNOWN
    if value < 600:
        return f"{value:.1f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float) -> str:
    """Format `0.12345` as `12.3 %`."""
    return f"{100 * share:.1f} %"


def human_duration(seconds: float) -> str:
    """Format `0.0123` as `12.3 ms`, and `200000` as `2 d 7 h`."""
    if seconds < 1:
        return (
            f"{1000 * seconds:.3g} ms"
            if seconds >= 1e-3
            else f"{1e6 * seconds:.0f} us"
            if seconds
            else "0"
        )
    if seconds < 48 * 3600:
        return human_seconds(seconds)
    hours = round(seconds / 3600)
    return f"{hours // 24:,} d {hours % 24} h"


def human_rate(bits_per_second: float) -> str:
    """Format `2.5e9` as `2.5 Gbit/s`."""
    for unit, size in (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:.3g} {unit}/s"
    return f"{bits_per_second:.3g} bit/s"


def human_loss(value: float | None) -> str:
    """Format a loss with four decimals, or None as a dash."""
    return UNKNOWN if value is None else f"{value:.4f}"


def one_line(text: str) -> str:
    """Make text from elsewhere safe for a terminal by removing line breaks and escape codes."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the cells in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(cells)
        )
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def parse_bits_per_second(text: str) -> float:
    """Parse a rate above 0: `100mbit` or `100mbit/s` is 1e8.

    Raises ConfigError, which does not name the place of the text.
    """
    rate = _parse(text.removesuffix("/s"), BIT_RATES)
    if rate is None or rate <= 0:
        raise ConfigError(
            f"{text!r} is not a bit rate; allowed: a number above 0 and one of "
            f"{', '.join(BIT_RATES)} (per second), for example 100mbit or 2.5gbit"
        )
    return rate


def parse_seconds(text: str) -> float:
    """Parse `50ms` as 0.05. The time may be 0. Raises ConfigError, which does not name the place of
    the text.
    """
    seconds = _parse(text, SECONDS)
    if seconds is None:
        raise ConfigError(
            f"{text!r} is not a time; allowed: a number and one of {', '.join(SECONDS)}, for "
            "example 50ms or 0.2s"
        )
    return seconds


def _parse(text: str, units: Mapping[str, float]) -> float | None:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units:
        return None
    value = float(found[1]) * units[found[2]]
    return value if math.isfinite(value) else None


def _scaled(value: float, units: tuple[str, ...], gap: str) -> str:
    index = 0
    # 999.5 would be rounded to 1000 of the smaller unit.
    while abs(value) >= 999.5 and index < len(units) - 1:
        value = value / 1000
        index = index + 1
    digits = f"{value:.0f}" if index == 0 or abs(value) >= 99.95 else f"{value:.3g}"
    return f"{digits}{gap}{units[index]}"
