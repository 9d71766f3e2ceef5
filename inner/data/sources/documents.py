"""The Source protocol, and the documents that sources yield, each with a stable key."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

from inner.data.chat.messages import parse_messages, to_text
from inner.errors import InputError

log = logging.getLogger(__name__)

Place = list[int]
"""A place in a source, as numbers that only the source itself interprets. It is stored as JSON."""
MIN_CUT_CHARACTERS = 1000
"""A text with fewer characters is not cut in two."""


@dataclass(frozen=True)
class Document:
    """One text. Its key is a relative path or path#row, and is the same on every island."""

    key: str
    text: str
    share: float | None = None
    """Share of the source that has been read up to the end of this document, 0 to 1; None if
    unknown."""
    is_end: bool = False
    """Whether this is the end of a longer text, which is held out regardless of its key, see
    `hold_out_an_end`."""
    place: Place | None = None
    """The place from which the source can continue with this document; None if it can only start
    from its beginning."""


class Source(Protocol):
    """Yields documents. A source is built from a config and reads nothing until one of its methods
    is called.

    >>> from inner.data.sources.stdlib import StdlibSource
    >>> source: Source = StdlibSource()
    >>> next(source.documents()).key
    '__future__.py'
    """

    def fingerprint(self) -> object:
        """Return JSON values that, together with the config, identify the text. Needs no
        network.
        """
        ...

    def documents(self) -> Iterator[Document]:
        """Yield all documents in a fixed order. No document is empty. Raises InputError if there is
        none or one is broken.
        """
        ...


@runtime_checkable
class SeekableSource(Protocol):
    """A source that can start reading in the middle."""

    def documents_from(self, place: Place) -> Iterator[Document]:
        """Yield the document at a place that `documents` has given, and all documents after it."""
        ...


def read_from(source: Source, number: int, place: Place | None) -> Iterator[Document]:
    """Yield the documents of a source from `number` on. Skips documents from the beginning if the
    source cannot seek to `place`.
    """
    if place is not None and isinstance(source, SeekableSource):
        return source.documents_from(place)
    return islice(source.documents(), number, None)


@lru_cache(1 << 12)  # It is asked several times for each document.
def is_heldout(key: str, heldout_fraction: float) -> bool:
    """Return whether a document is held out. Only the key decides, so all machines and runs
    agree.
    """
    value = int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big")
    return value / 2**64 < heldout_fraction


def hold_out_an_end(documents: Iterable[Document], heldout_fraction: float) -> Iterator[Document]:
    """Yield the documents. If none of them is held out, cut the last one in two and hold out its
    end.

    A single long text can therefore be trained on without preparation.
    """
    has_heldout = False
    last = None
    for document in documents:
        if last is not None:
            yield last
        last = document
        has_heldout = has_heldout or is_heldout(document.key, heldout_fraction)
    if last is not None and not has_heldout and len(last.text) >= MIN_CUT_CHARACTERS:
        yield from _cut(last, heldout_fraction)
    elif last is not None:
        yield last


def _cut(document: Document, heldout_fraction: float) -> tuple[Document, Document]:
    """Return the beginning of a text and its last `heldout_fraction`, which starts at the beginning
    of a line if possible.
    """
    text = document.text
    at = int(len(document.text) * (1 - heldout_fraction))
    at = text.rfind("\n", 1, at) + 1 or max(at, 1)
    log.info(
        "no whole document is held out, so the last %d characters of %s are held out",
        len(text) - at,
        document.key,
    )
    end = Document(f"{document.key}#end", text[at:], document.share, is_end=True)
    return replace(document, text=text[:at]), end


class TextField(NamedTuple):
    """The field of a row that holds its text, or its conversation."""

    name: str
    is_chat: bool = False


def row_text(row: Mapping[str, object], field: TextField, where: str) -> str:
    """Return the text of a row, empty if it is null. A conversation becomes the text of its
    messages (inner/data/chat).

    Raises InputError, naming the existing fields, if the field is missing.
    """
    text_field = field.name
    if text_field not in row:
        raise missing_field_error(text_field, list(row), where)
    if field.is_chat:
        return to_text(parse_messages(row[text_field], where))
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InputError(
            f"{where}: field {text_field!r} must be text, got {type(text).__name__}; set "
            "data.text_field"
        )
    return text


def missing_field_error(text_field: str, fields: list[str], where: str) -> InputError:
    """Build the error for rows without the text field."""
    existing = ", ".join(sorted(fields)) or "none"
    return InputError(
        f"{where}: no field {text_field!r} (data.text_field); the existing fields are: {existing}; "
        "set data.text_field to one of them"
    )
