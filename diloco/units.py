"""Numbers as people read them. Decimal units: 1 MB is 10^6 bytes, as links are rated."""

UNKNOWN = "-"


def human_count(value: float | None) -> str:
    """`1234567` as `1.23M`."""
    return UNKNOWN if value is None else _scaled(value, ("", "k", "M", "B", "T"), "")


def human_bytes(value: float | None) -> str:
    """`1234567` as `1.23 MB`."""
    return UNKNOWN if value is None else _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"), " ")


def human_seconds(value: float | None) -> str:
    """`3723` as `1 h 02 min`; under ten minutes in seconds."""
    if value is None:
        return UNKNOWN
    if value < 600:
        return f"{value:.1f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def human_loss(value: float | None) -> str:
    """Four decimals, or a dash when there is none."""
    return UNKNOWN if value is None else f"{value:.4f}"


def one_line(text: str) -> str:
    """Text from elsewhere made safe for a terminal: no line breaks, no escape codes."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _scaled(value: float, units: tuple[str, ...], gap: str) -> str:
    index = 0
    # 999.5 would print as 1000 of the smaller unit.
    while abs(value) >= 999.5 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    digits = f"{value:.0f}" if index == 0 or abs(value) >= 99.95 else f"{value:.3g}"
    return f"{digits}{gap}{units[index]}"
