"""An own source of documents as an example of the contract in inner/data/sources/own_source.py, and
some that break it.

Nothing of this project is imported: a source needs none of it.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

_CALLS = itertools.count()


class Tables:
    """Multiplication tables, one document for each number: text that is computed."""

    def __init__(self, numbers: int, columns: int = 9) -> None:
        self._numbers, self._columns = numbers, columns

    def fingerprint(self) -> object:
        """Which version of the text this is; options are known to the run anyway."""
        return {"version": 1}

    def documents(self) -> Iterator[tuple[str, str]]:
        """(key, text) of each number, in order."""
        for number in range(self._numbers):
            products = (
                f"{number} x {factor} = {number * factor}\n"
                for factor in range(1, self._columns + 1)
            )
            yield f"table/{number}", "".join(products)


class SeekableTables(Tables):
    """The same, for text in shards: after a restart it begins where it was."""

    def documents_from(self, number: int) -> Iterator[tuple[str, str]]:
        """The pairs from this number on. It need not make those before."""
        products = range(1, self._columns + 1)
        for each in range(number, self._numbers):
            yield (
                f"table/{each}",
                "".join(f"{each} x {factor} = {each * factor}\n" for factor in products),
            )


class Lines:
    """The lines of files, each as a document. The places come by `data.paths`, which an island may
    replace.
    """

    def __init__(self, paths: list[str], skip: int = 0) -> None:
        self._paths, self._skip = [Path(path) for path in paths], skip

    def fingerprint(self) -> object:
        """Size and time of each file."""
        return [[path.stat().st_size, path.stat().st_mtime_ns] for path in self._paths]

    def documents(self) -> Iterator[tuple[str, str]]:
        """(key, text) of each line; keys have no folder, so they are the same on every island."""
        for path in self._paths:
            for number, line in enumerate(path.read_text().splitlines()[self._skip :]):
                yield f"{path.name}#{number}", line


class Shuffled(Tables):
    """Breaks the contract: another order at each reading."""

    def documents(self) -> Iterator[tuple[str, str]]:
        """The first table comes first or last."""
        return iter(sorted(super().documents(), reverse=bool(next(_CALLS) % 2)))


class Restless(Tables):
    """Breaks the contract: its fingerprint follows from nothing."""

    def fingerprint(self) -> object:
        """Another one at each call."""
        return next(_CALLS)


class BeginsLate(Tables):
    """Breaks the contract: it goes on with the pair behind the one that is asked for."""

    def documents_from(self, number: int) -> Iterator[tuple[str, str]]:
        """One too late."""
        return itertools.islice(self.documents(), number + 1, None)


class SameKeys(Tables):
    """Breaks the contract: all documents would be held out together, or none."""

    def documents(self) -> Iterator[tuple[str, str]]:
        """All with one key."""
        return (("key", text) for _, text in super().documents())


class TextsAlone(Tables):
    """Breaks the contract: documents without keys."""

    def documents(self) -> Iterator[tuple[str, str]]:
        """No pairs."""
        return (text for _, text in super().documents())  # pyright: ignore[reportReturnType]


class Breaks(Tables):
    """Fails while it is read."""

    def documents(self) -> Iterator[tuple[str, str]]:
        """One document, and then an error."""
        yield "first", "text"
        raise RuntimeError("the tape is torn")


class NoFingerprint:
    """Breaks the contract: nothing says when the text has changed."""

    def documents(self) -> Iterator[tuple[str, str]]:
        """Nothing."""
        return iter(())
