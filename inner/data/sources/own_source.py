"""An own source of documents, named by its import path, and what is tried with it before a run starts.

`data.source: my_package.sources:Papers` is a class or function. It is called as

    Papers(**data.options)                        or, with data.paths,  Papers(paths=[...], **data.options)

and gives an object with two methods:

    fingerprint() -> JSON value       changes when the text does; needs no network
    documents() -> iterator           of pairs (key, text), both str, in a fixed order

What it must keep to:

- Each call of `documents()` yields the same pairs in the same order, in every process and on every island. A
  preparation that was killed goes on after the documents that it has, by their number.
- It may have a third method, `documents_from(number)`, which yields the pair of this number, counted from 0, and those
  after it. Where text is read in shards (`data.order: shards`) it is called after a restart. Without it all pairs
  before are read again, though not tokenised.
- A key is unique and the same on every island, for example a relative path: its hash decides whether a document is
  held out.
- What lies in different places on different machines comes by `paths`. Options come from the run's config, which a
  joiner gets from a swarm.
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
"""Documents that are read twice before a run starts."""


@dataclass(frozen=True)
class OwnSource:
    """An own source with the interface of ours."""

    path: str
    source: Any
    """What the import path names has made."""

    def fingerprint(self) -> object:
        """The source's own, and the hash of its file: other code may read other text."""
        own = self._call("fingerprint")
        try:
            json.dumps(own)
        except (TypeError, ValueError) as error:
            raise InputError(f"{KEY}: fingerprint() of {self.path} is no JSON value ({error})") from error
        return [own, source_sha256(self.path, KEY)]

    def documents(self) -> Iterator[Document]:
        """Yield all documents that are not empty. Raises InputError if one is no pair of texts or there is none."""
        found = False
        for document in self._read(0, "documents"):
            found = True
            yield document
        if not found:
            raise InputError(f"{KEY}: {self.path} has no document with text; see data.options and data.paths")

    def documents_from(self, place: Place) -> Iterator[Document]:
        """The documents from one on, by the number of its pair."""
        (number,) = place
        return self._read(number, "documents_from", number)

    @property
    def can_seek(self) -> bool:
        """Whether it can begin in its middle."""
        return callable(getattr(self.source, "documents_from", None))

    def _read(self, first: int, method: str, *arguments: int) -> Iterator[Document]:
        for number, pair in enumerate(self._pairs(method, *arguments), start=first):
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, str) for each in pair)):
                got = f"{type(pair).__name__} {pair!r}"[:200]
                raise InputError(f"{KEY}: document {number} of {self.path} is {got}; need a pair (key, text) of str")
            if pair[1]:
                yield Document(*pair, place=[number] if self.can_seek else None)

    def _pairs(self, method: str, *arguments: int) -> Iterator[object]:
        try:
            yield from self._call(method, *arguments)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{KEY}: {self.path} failed in {method}(): {summarise(error)}") from error

    def _call(self, method: str, *arguments: int) -> Any:
        try:
            return getattr(self.source, method)(*arguments)
        except Exception as error:
            raise InputError(f"{KEY}: {self.path} failed in {method}(): {summarise(error)}") from error


def build_own_source(config: DataConfig) -> OwnSource:
    """Call what the config names, which reads nothing yet. Raises InputError if that fails."""
    found = load(config.source, KEY)
    arguments = config.options | ({"paths": config.paths} if config.paths else {})
    try:
        source = found(**arguments)
    except Exception as error:
        raise InputError(
            f"{KEY}: {config.source} is {call_text(found)}, and called with {', '.join(arguments) or 'nothing'} it "
            f"raised {summarise(error)}; see data.options and data.paths"
        ) from error
    for method in ("fingerprint", "documents"):
        if not callable(getattr(source, method, None)):
            raise InputError(
                f"{KEY}: {config.source} gives {type(source).__name__} without the method {method}(); see "
                "docs/extending.md"
            )
    return OwnSource(config.source, source)


def check_own_source(source: OwnSource) -> None:
    """Read the first documents and the fingerprint twice. Raises InputError if they differ, or a key occurs twice.

    A source that can begin in its middle must find there what it has there.
    """
    if source.fingerprint() != source.fingerprint():
        raise InputError(f"{KEY}: fingerprint() of {source.path} differs from call to call; derive it from the text")
    first, second = (list(islice(source.documents(), NUM_TRIED)) for _ in range(2))
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            raise InputError(
                f"{KEY}: document {number} of {source.path} is {one.key!r}, and read again {other.key!r}; "
                "the order and the texts must be fixed: sort what is listed, and seed what is drawn"
            )
    keys = [document.key for document in first]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"{KEY}: {source.path} has several documents with the key {twice!r}; give each its own")
    if source.can_seek and len(first) > 1 and (place := first[-1].place) is not None:
        found = next(source.documents_from(place), None)
        if found != first[-1]:
            raise InputError(
                f"{KEY}: documents_from({place[0]}) of {source.path} begins with {found and found.key!r}, and pair "
                f"{place[0]} of documents() is {first[-1].key!r}; begin with the same pair, or leave documents_from out"
            )
