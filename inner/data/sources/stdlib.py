"""The source files of the running interpreter's standard library: text that is always at hand."""

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inner.data.documents import Document
from inner.errors import InputError

NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class StdlibSource:
    """Every UTF-8 .py file below `folder`, sorted by relative path."""

    folder: Path

    def fingerprint(self) -> object:
        """Another Python has another library."""
        return [sys.version, str(self.folder)]

    def documents(self) -> Iterator[Document]:
        """One document per file; its key is the path below the library's folder."""
        found = False
        files = _python_files(self.folder)
        for number, (key, path) in enumerate(files, start=1):
            text = _utf8_or_empty(path)
            if text:
                found = True
                yield Document(key, text, number / len(files))
        if not found:
            raise InputError(
                f"data.source=python-stdlib: no readable .py file below {self.folder} (this Python comes "
                "without its sources); use data.source=files with data.paths"
            )


def stdlib_source() -> StdlibSource:
    """The running interpreter's library."""
    return StdlibSource(Path(sysconfig.get_path("stdlib")))


def _python_files(folder: Path) -> list[tuple[str, Path]]:
    files = ((path.relative_to(folder), path) for path in folder.rglob("*.py"))
    return sorted((key.as_posix(), path) for key, path in files if not NOT_STDLIB & set(key.parts))


def _utf8_or_empty(path: Path) -> str:
    # The library's own tests hold files in other encodings on purpose; links may lead nowhere.
    try:
        return path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
