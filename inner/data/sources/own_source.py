"""An own source of documents, named by its import path, and the checks of it before a run starts.

`data.source: my_package.sources:Papers` is a class or function. It is called as

    Papers(**data.options)                        or, with data.paths,  Papers(paths=[...],
                                                  **data.options)

and returns an object with two methods:

    fingerprint() -> JSON value       changes when the text does; needs no network
    documents() -> iterator           of pairs (key, text), both str, in a fixed order

Requirements:

- Each call of `documents()` yields the same pairs in the same order, in every process and on every
  island. When a preparation was killed, the next one skips the documents that are already prepared,
  by their number.
- It may have a third method, `documents_from(number)`, which yields the pair with this number,
  counted from 0, and all pairs after it. If text is read in shards (`data.order: shards`) it is
  called after a restart. Without it all earlier pairs are read again, though not tokenised.
- A key is unique and the same on every island, for example a relative path: its hash decides
  whether a document is held out.
- Locations that differ between machines are passed in `paths`. Options come from the run's config,
  which a joiner gets from a swarm.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from inner.config import DataConfig
from inner.data.sources.documents import Document, Place
from inner.errors import InputError, summarise
from inner.import_path import call_text, load, source_sha256

KEY = "data.source"
NUM_TRIED = 100
"""Number of documents that are read twice before a run starts."""


@dataclass(frozen=True)
class OwnSource:
    """An own source with the interface of the built-in sources."""

    path: str
    source: Any
    """The object that the class or function of the import path returned."""

    def fingerprint(self) -> object:
        """Return the source's own fingerprint and the hash of its file, because changed code may
        read another text.
        """
        own = self._call("fingerprint")
        try:
            json.dumps(own)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{KEY}: fingerprint() of {self.path} is not a JSON value ({error})"
            ) from error
        return [own, source_sha256(self.path, KEY)]

    def documents(self) -> Iterator[Document]:
        """Yield all documents that are not empty. Raises InputError if an item is not a pair of
        texts or there are no documents.
        """
        found = False
        for document in self._read(0, "documents"):
            found = True
            yield document
        if not found:
            raise InputError(
                f"{KEY}: {self.path} has no document with text; see data.options and data.paths"
            )

    def documents_from(self, place: Place) -> Iterator[Document]:
        """Yield the documents from `place` on, which is the number of a pair."""
        (number,) = place
        return self._read(number, "documents_from", number)

    @property
    def can_seek(self) -> bool:
        """Whether the source can start reading in the middle."""
        return callable(getattr(self.source, "documents_from", None))

    def _read(self, first: int, method: str, *arguments: int) -> Iterator[Document]:
        for number, pair in enumerate(self._pairs(method, *arguments), start=first):
            if not (
                isinstance(pair, tuple)
                and len(pair) == 2
                and all(isinstance(each, str) for each in pair)
            ):
                got = f"{type(pair).__name__} {pair!r}"[:200]
                raise InputError(
                    f"{KEY}: document {number} of {self.path} is {got}; need a pair (key, text) of "
                    "str"
                )
            if pair[1]:
                yield Document(*pair, place=[number] if self.can_seek else None)

    def _pairs(self, method: str, *arguments: int) -> Iterator[object]:
        try:
            yield from self._call(method, *arguments)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{KEY}: {self.path} failed in {method}(): {summarise(error)}"
            ) from error

    def _call(self, method: str, *arguments: int) -> Any:
        try:
            return getattr(self.source, method)(*arguments)
        except Exception as error:
            raise InputError(
                f"{KEY}: {self.path} failed in {method}(): {summarise(error)}"
            ) from error


def build_own_source(config: DataConfig) -> OwnSource:
    """Call the class or function that the config names; it reads nothing yet. Raises InputError if
    that fails.
    """
    found = load(config.source, KEY)
    arguments = config.options | ({"paths": config.paths} if config.paths else {})
    try:
        source = found(**arguments)
    except Exception as error:
        raise InputError(
            f"{KEY}: {config.source} is {call_text(found)}, and called with "
            f"{', '.join(arguments) or 'nothing'} it "
            f"raised {summarise(error)}; see data.options and data.paths"
        ) from error
    for method in ("fingerprint", "documents"):
        if not callable(getattr(source, method, None)):
            raise InputError(
                f"{KEY}: {config.source} returns {type(source).__name__} without the method "
                f"{method}(); see docs/extending.md"
            )
    return OwnSource(config.source, source)


def check_own_source(source: OwnSource) -> None:
    """Read the first documents and the fingerprint twice. Raises InputError if they differ, or a
    key occurs twice.

    If the source can start in the middle, it must yield the same documents there.
    """
    if source.fingerprint() != source.fingerprint():
        raise InputError(
            f"{KEY}: fingerprint() of {source.path} differs from call to call; derive it from the "
            "text"
        )
    first, second = (list(islice(source.documents(), NUM_TRIED)) for _ in range(2))
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            raise InputError(
                f"{KEY}: document {number} of {source.path} is {one.key!r}, and when read again "
                f"{other.key!r}; the order and the texts must be fixed: sort lists of files, and "
                "seed random numbers"
            )
    keys = [document.key for document in first]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(
            f"{KEY}: {source.path} has several documents with the key {twice!r}; give each its own"
        )
    if source.can_seek and len(first) > 1 and (place := first[-1].place) is not None:
        found = next(source.documents_from(place), None)
        if found != first[-1]:
            raise InputError(
                f"{KEY}: documents_from({place[0]}) of {source.path} begins with "
                f"{found and found.key!r}, and pair "
                f"{place[0]} of documents() is {first[-1].key!r}; begin with the same pair, or "
                "leave documents_from out"
            )
