"""What every source of text gives: documents, each with a stable key."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from inner.errors import InputError


@dataclass(frozen=True)
class Document:
    """One text. The key is its relative path, or path#row, and is the same on every island."""

    key: str
    text: str
    share: float | None = None
    """How much of the source has been read with it, 0 to 1, where that is known."""


class Source(Protocol):
    """Where documents come from. It is built from a config and touches nothing until it is asked."""

    def fingerprint(self) -> object:
        """What decides the text besides the config, as JSON values; never asks the network."""
        ...

    def documents(self) -> Iterator[Document]:
        """All documents in a fixed order, at least one, none empty. InputError: there is none, or it is broken."""
        ...


def is_heldout(key: str, heldout_fraction: float) -> bool:
    """Whether a document is held out: decided by its key alone, so the same on every machine and in every run."""
    value = int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big")
    return value / 2**64 < heldout_fraction


def row_text(row: Mapping[str, object], text_field: str, where: str) -> str:
    """The text of a row, empty if it is null. InputError names the fields there are."""
    if text_field not in row:
        raise missing_field(text_field, list(row), where)
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InputError(
            f"{where}: field {text_field!r} must hold text, got {type(text).__name__}; set data.text_field"
        )
    return text


def missing_field(text_field: str, fields: list[str], where: str) -> InputError:
    """The error for rows without the text field."""
    there = ", ".join(sorted(fields)) or "none"
    return InputError(
        f"{where}: no field {text_field!r} (data.text_field); the fields there are: {there}; "
        "set data.text_field to one of them"
    )
