"""Valid files with something wrong in them, as hypothesis draws them."""

import json
from typing import Any

from hypothesis import strategies as st

DEEP = "nested deeply"
"""Stands in a value for what json cannot write."""
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        1 << 31,
        1 << 63,
        10**30,
        10**400,
        0.5,
        -0.0,
        1e308,
        float("inf"),
        float("nan"),
    ),
    *("", "a", "a" * 5000, "\ud800", "\x00", "../../etc/passwd", DEEP),
    *([], {}, [[]], [None], [0] * 300, {"a": 1}, {"": {}}),
]
BYTES = [
    b"",
    b"\x00" * 8,
    b"\xff" * 8,
    b"[" * 3000,
    b"{" * 100,
    b'"',
    b"9" * 400,
    b"\n",
    b",",
    b"]}",
    b"\x7f\xff\xff\xff",
]


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """The bytes with a few places changed, cut out, repeated or filled with others."""
    raw = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        stop = min(len(raw), start + draw(st.sampled_from([0, 1, 2, 4, 8, 64, 1 << 30])))
        between = draw(
            st.sampled_from(BYTES)
            | st.integers(0, 255).map(lambda byte: bytes([byte]))
            | st.just(raw[start:stop] * 2)
        )
        raw = raw[:start] + between + raw[stop:]
    return raw


@st.composite
def odd_json(draw: st.DrawFn, valid: bytes) -> bytes:
    """The JSON with some of its values replaced by odd ones, or left out."""
    value = json.loads(valid)
    for _ in range(draw(st.integers(1, 3))):
        value = draw(_changed(value))
    return json.dumps(value).replace(json.dumps(DEEP), "[" * 5000 + "]" * 5000).encode()


@st.composite
def _changed(draw: st.DrawFn, value: Any) -> Any:
    if not value or not isinstance(value, dict | list) or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(ODD))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw(st.sampled_from(keys))
    changed = value.copy()
    if draw(st.integers(0, 5)) == 0:
        del changed[key]
    else:
        changed[key] = draw(_changed(value[key]))
    return changed
