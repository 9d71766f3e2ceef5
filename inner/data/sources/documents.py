"""The Source protocol and the documents that sources yield, each with a stable key."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from inner.errors import InputError


@dataclass(frozen=True)
class Document:
    """One text. Its key is a relative path or path#row, and is the same on every island."""

    key: str
    text: str
    share: float | None = None
    """Share of the source that has been read up to the end of this document, 0 to 1; None if unknown."""


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


def is_heldout(key: str, heldout_fraction: float) -> bool:
    """Whether a document is held out. The key alone decides, so every machine and every run agree."""
    value = int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big")
    return value / 2**64 < heldout_fraction


def row_text(row: Mapping[str, object], text_field: str, where: str) -> str:
    """Text of a row, empty if it is null. Raises InputError, naming the existing fields, if the field is missing."""
    if text_field not in row:
        raise missing_field_error(text_field, list(row), where)
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
