"""The Python sources of the running interpreter's standard library: text that is available
everywhere.
"""

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inner.data.sources.documents import Document, Place
from inner.errors import InputError

NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class StdlibSource:
    """All UTF-8 .py files below `folder`, sorted by relative path."""

    folder: Path = Path(sysconfig.get_path("stdlib"))

    def fingerprint(self) -> object:
        """Return the version of Python and the folder of its library."""
        return [sys.version, str(self.folder)]

    def documents(self) -> Iterator[Document]:
        """Yield one document per file; its key is the path relative to the library's folder."""
        found = False
        for document in self.documents_from([0]):
            found = True
            yield document
        if not found:
            raise InputError(
                f"data.source=python-stdlib: no readable .py file below {self.folder} (this Python "
                "comes without its sources); use data.source=files with data.paths"
            )

    def documents_from(self, place: Place) -> Iterator[Document]:
        """Yield the documents from `place` on, which is the number of a file."""
        files = _python_files(self.folder)
        for number, (key, path) in enumerate(files[place[0] :], start=place[0]):
            if text := _utf8_or_empty(path):
                yield Document(key, text, (number + 1) / len(files), place=[number])


def _python_files(folder: Path) -> list[tuple[str, Path]]:
    files = ((path.relative_to(folder), path) for path in folder.rglob("*.py"))
    return sorted((key.as_posix(), path) for key, path in files if not NOT_STDLIB & set(key.parts))


def _utf8_or_empty(path: Path) -> str:
    # The library's tests contain files in other encodings on purpose, and links may be broken.
    try:
        return path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
