"""The Source protocol and the documents that sources yield, each with a stable key."""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

from inner.data.chat.messages import parse_messages, to_text
from inner.errors import InputError

log = logging.getLogger(__name__)

Place = list[int]
"""A place in a source, in numbers that the source itself understands; it is kept in JSON."""
MIN_CUT_CHARACTERS = 1000
"""A shorter text is not cut in two."""


@dataclass(frozen=True)
class Document:
    """One text. Its key is a relative path or path#row, and is the same on every island."""

    key: str
    text: str
    share: float | None = None
    """Share of the source that has been read up to the end of this document, 0 to 1; None if unknown."""
    is_end: bool = False
    """Whether it is the end of a longer text, which is held out whatever its key says: see `hold_out_an_end`."""
    place: Place | None = None
    """From where the source can read on with this document; None if only from its beginning."""


class Source(Protocol):
    """Yields documents. A source is built from a config and reads nothing until one of its methods is called.

    >>> from inner.data.sources.stdlib import StdlibSource
    >>> source: Source = StdlibSource()
    >>> next(source.documents()).key
    '__future__.py'
    """

    def fingerprint(self) -> object:
        """JSON values that, together with the config, identify the text; needs no network."""
        ...

    def documents(self) -> Iterator[Document]:
        """Yield all documents in a fixed order; none is empty. Raises InputError if there are none or one is broken."""
        ...


@runtime_checkable
class SeekableSource(Protocol):
    """A source that can begin in its middle."""

    def documents_from(self, place: Place) -> Iterator[Document]:
        """Yield the document at a place that `documents` has given, and those after it."""
        ...


def read_from(source: Source, number: int, place: Place | None) -> Iterator[Document]:
    """The documents of a source from `number` on; from its beginning only where `place` cannot be found otherwise."""
    if place is not None and isinstance(source, SeekableSource):
        return source.documents_from(place)
    return islice(source.documents(), number, None)


def is_heldout(key: str, heldout_fraction: float) -> bool:
    """Whether a document is held out. The key alone decides, so every machine and every run agree."""
    value = int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big")
    return value / 2**64 < heldout_fraction


def hold_out_an_end(documents: Iterable[Document], heldout_fraction: float) -> Iterator[Document]:
    """Yield the documents, of which the last one is cut in two if none is held out: its end then is.

    So one long text can be trained on as it is.
    """
    has_heldout, last = False, None
    for document in documents:
        if last is not None:
            yield last
        last, has_heldout = document, has_heldout or is_heldout(document.key, heldout_fraction)
    if last is not None and not has_heldout and len(last.text) >= MIN_CUT_CHARACTERS:
        yield from _cut(last, heldout_fraction)
    elif last is not None:
        yield last


def _cut(document: Document, heldout_fraction: float) -> tuple[Document, Document]:
    """The beginning of a text and its last `heldout_fraction`, which begins a line if there are lines."""
    text, at = document.text, int(len(document.text) * (1 - heldout_fraction))
    at = text.rfind("\n", 1, at) + 1 or max(at, 1)
    log.info("no whole document is held out, so the last %d characters of %s are", len(text) - at, document.key)
    end = Document(f"{document.key}#end", text[at:], document.share, is_end=True)
    return replace(document, text=text[:at]), end


class TextField(NamedTuple):
    """The field of a row that holds its text, or its conversation."""

    name: str
    is_chat: bool = False


def row_text(row: Mapping[str, object], field: TextField, where: str) -> str:
    """Text of a row, empty if it is null. A conversation becomes the text of its messages (inner/data/chat).

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
        raise InputError(f"{where}: field {text_field!r} must be text, got {type(text).__name__}; set data.text_field")
    return text


def missing_field_error(text_field: str, fields: list[str], where: str) -> InputError:
    """Build the error for rows without the text field."""
    existing = ", ".join(sorted(fields)) or "none"
    return InputError(
        f"{where}: no field {text_field!r} (data.text_field); the existing fields are: {existing}; "
        "set data.text_field to one of them"
    )
