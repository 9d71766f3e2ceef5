"""Long messages are compressed, and what a peer has compressed is not trusted."""

import zlib

import pytest

from outer.errors import MessageError
from outer.limits import MAX_BYTES
from outer.network.messages import LONG_BYTES, deflate, inflate

LONG = b'{"islands": [' + b",".join(b'"island-%d"' % index for index in range(2000)) + b"]}"


def test_a_long_message_comes_out_as_it_went_in_and_is_shorter_on_the_way() -> None:
    assert inflate(deflate(LONG)) == LONG and len(deflate(LONG)) < len(LONG) / 2


@pytest.mark.parametrize("body", [b"", b"{}", LONG[:LONG_BYTES]])
def test_short_and_huge_messages_stay_as_they_are(body: bytes) -> None:
    assert deflate(body) == body and inflate(body) == body


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (zlib.compress(bytes(MAX_BYTES + 1)), "more than 5242880 bytes"),
        (zlib.compress(LONG)[:-5], "cut off"),
        (zlib.compress(LONG) + b"x", "cut off"),
        (b"x" + LONG, "cannot be read"),
    ],
)
def test_a_peers_bomb_and_its_garbage_are_refused(body: bytes, text: str) -> None:
    with pytest.raises(MessageError, match=text):
        inflate(body)
