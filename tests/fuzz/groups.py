"""All groups of decoders."""

from collections.abc import Callable

from tests.fuzz.codecs import build_codecs
from tests.fuzz.entries import Entries
from tests.fuzz.messages import build_messages

GROUPS: dict[str, Callable[[], Entries]] = {
    "messages": build_messages,
    "codecs": build_codecs,
}
