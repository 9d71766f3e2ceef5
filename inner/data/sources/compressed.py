"""Files that hold documents in compressed form or in an archive: JSON Lines compressed by gzip or
zstd, and tar archives (WebDataset's form).
"""

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tarfile import (
    EmptyHeaderError,  # pyright: ignore[reportAttributeAccessIssue]
    EOFHeaderError,  # pyright: ignore[reportAttributeAccessIssue]
    HeaderError,
    ReadError,
    TarError,
)
from typing import IO, Any, NamedTuple, Self, cast

from inner.data.sources.documents import TextField, row_text
from inner.errors import InputError
from inner.foreign.files import MAX_DOCUMENT_BYTES, open_file, read_at_most
from inner.foreign.text import parse_json

MAX_HEADER_BYTES = 1 << 20
"""Largest size of the name or the attributes of a tar member. A larger header is refused."""
BUFFER_BYTES = 1 << 17
MAX_ZSTD_WINDOW = 1 << 31
"""The window of `zstd --long=31`, the longest that exists."""
ZSTD_READ_BYTES = 1 << 12
"""Number of compressed bytes that are decompressed at a time. At most 128 MiB come out, because 4
bytes can become 128 KiB."""


class DocumentRow(NamedTuple):
    """A document in a file."""

    key: str
    text: str
    share: float
    """Share of the file that has been read up to the end of this document."""
    number: int = 0
    """Number of the row in the file."""
    offset: int = 0
    """Offset of the row in the file, in bytes; 0 if reading cannot begin there."""


def is_compressed(path: Path) -> bool:
    """Return whether the name says that the file is compressed in a form that `open_lines`
    reads.
    """
    return path.name.lower().endswith((".gz", ".zst"))


def read_whole(path: Path) -> bytes:
    """Return the content of a file, decompressed. Raises InputError if it is damaged or larger than
    a document may be.
    """
    with open_lines(path) as (lines, raw):
        # Check the size first: a sparse file can have any size without taking space on the disk.
        is_longer = lines is raw and path.stat().st_size > MAX_DOCUMENT_BYTES
        data = b"" if is_longer else read_at_most(lines, MAX_DOCUMENT_BYTES + 1)
    if is_longer or len(data) > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"{path}: is one document and has more than {MAX_DOCUMENT_BYTES} bytes; write it as "
            ".jsonl"
        )
    return data


@contextmanager
def open_lines(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Yield the lines of a file, decompressed if it ends in .gz or .zst, and the file itself, whose
    position shows progress.

    Raises InputError if it is damaged or cut off.
    """
    try:
        with open_file(path) as raw:
            if is_compressed(path) and not path.stat().st_size:
                raise EOFError(
                    "it is empty, but a compressed file has a header even without content"
                )
            if path.suffix.lower() == ".gz":
                with io.BufferedReader(gzip.open(raw), BUFFER_BYTES) as lines:  # pyright: ignore[reportArgumentType]
                    yield cast(IO[bytes], lines), raw
            elif path.suffix.lower() == ".zst":
                with open_zstd(path, raw) as lines:
                    yield lines, raw
            else:
                yield raw, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: cannot be decompressed ({error}); write it again or remove it"
        ) from error


@contextmanager
def open_zstd(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield the decompressed content of a zstd file. Raises InputError if it is damaged or cut
    off.
    """
    import zstandard

    try:
        with io.BufferedReader(ZstdReader(raw)) as lines:
            yield cast(IO[bytes], lines)
    except zstandard.ZstdError as error:
        raise InputError(
            f"{path}: cannot be decompressed ({error}); write it again or remove it"
        ) from error


class ZstdReader(io.RawIOBase):
    """The decompressed content of all frames of a file. Raises EOFError if the last frame is cut
    off.

    The library's own reader is not used, because it treats a frame that is cut off as complete.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._library = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
        self._raw = raw
        self._frame = None
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._content:
            self._compressed = self._compressed or self._raw.read(ZSTD_READ_BYTES)
            if not self._compressed and self._frame is not None:
                raise EOFError("it is cut off")
            if not self._compressed:
                return 0
            self._decompress()
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _decompress(self) -> None:
        frame = self._frame or self._library.decompressobj()
        self._content = memoryview(frame.decompress(self._compressed))
        self._compressed = frame.unused_data
        self._frame = None if frame.eof else frame


ADDS_TO_A_HEADER = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
"""Types of members that belong to the next member's header. They are read whole."""


class WholeTar(tarfile.TarFile):
    """One or several concatenated tar archives, the last of which must have an end marker.

    Python's own reader is not enough, because it treats a damaged or missing header as the end of
    the archive.
    """

    has_end = False
    """Whether the last header consisted of zeros, which mark the end of an archive."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "ignore_zeros": True, "tarinfo": WholeTarInfo})


class WholeTarInfo(tarfile.TarInfo):
    """A member of a WholeTar."""

    def _proc_member(self, tarfile: Any) -> Self:
        """Return the member that begins with this header. Raises ReadError if it would add too many
        bytes to the next header.

        tarfile's documentation names this method for subclasses. Newer Pythons do not call
        `frombuf` of a subclass.
        """
        if self.type in ADDS_TO_A_HEADER and self.size > MAX_HEADER_BYTES:
            raise ReadError(f"a header has {self.size} bytes; at most {MAX_HEADER_BYTES} are read")
        return super()._proc_member(tarfile)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Self:
        """Read the next header and return its member. Raises ReadError if it is damaged or the
        archive has no end marker.
        """
        try:
            member = super().fromtarfile(tarfile)
        except EOFHeaderError:
            tarfile.has_end = True
            raise
        except HeaderError as error:
            if isinstance(error, EmptyHeaderError) and tarfile.has_end:
                raise
            raise ReadError(f"it is damaged or cut off: {error}") from None
        tarfile.has_end = False
        return member


def tar_rows(key: str, path: Path, field: TextField, first: int = 0) -> Iterator[DocumentRow]:
    """Yield a row for each text in an archive, from member `first` on: .txt members, and a field of
    .json members.
    """
    size = path.stat().st_size
    try:
        with open_file(path) as raw, WholeTar.open(fileobj=raw, mode="r:*") as archive:
            for number, member in enumerate(islice(_members(archive), first, None), start=first):
                if member.isfile() and member.name.lower().endswith((".txt", ".json")):
                    text = _read_member(archive, member, f"{path}, member {member.name}", field)
                    yield DocumentRow(
                        f"{key}#{member.name}", text, min(raw.tell() / size, 1.0), number
                    )
    except (TarError, EOFError, zlib.error, OSError) as error:
        raise InputError(
            f"{path}: cannot be read as tar ({error}); write it again or remove it"
        ) from error


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive, and delete them from its list: a small compressed archive
    may have millions of headers.
    """
    while (member := archive.next()) is not None:
        archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
        yield member


def _read_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, where: str, field: TextField
) -> str:
    if member.size > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"{where}: has {member.size} bytes; a document has at most {MAX_DOCUMENT_BYTES}"
        )
    file = archive.extractfile(member)
    assert file is not None, "a member that is read must be a regular file"
    try:
        data = file.read()
        row = (
            parse_json(data)
            if member.name.lower().endswith(".json")
            else {field.name: data.decode("utf-8")}
        )
    except ValueError as error:
        raise InputError(
            f"{where}: is not UTF-8 text or JSON ({error}); write it again or remove it"
        ) from None
    if not isinstance(row, dict):
        raise InputError(
            f"{where}: got a JSON {type(row).__name__}, need an object such as {{'text': '...'}}"
        )
    return row_text(row, field, where)
