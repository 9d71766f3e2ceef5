"""Files that hold text in another file: JSON Lines compressed by gzip or zstd, and tar archives (WebDataset's form)."""

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, cast

from inner.data.sources.documents import TextField, row_text
from inner.errors import InputError

MAX_MEMBER_BYTES = 1 << 30
"""A longer member of an archive is no document."""


class Row(NamedTuple):
    """A document in a file."""

    key: str
    text: str
    share: float
    """Share of the file that has been read up to the end of this document."""
    number: int = 0
    """Number of the row in the file."""
    offset: int = 0
    """Where it begins in the file, in bytes; 0 where one cannot begin there."""


def is_compressed(path: Path) -> bool:
    """Whether the name says that the file is compressed in a form that `open_lines` reads."""
    return path.name.lower().endswith((".gz", ".zst"))


def read_whole(path: Path) -> bytes:
    """The content of a file, decompressed. Raises InputError if it is damaged or larger than one text may be."""
    with open_lines(path) as (lines, _):
        data = lines.read(MAX_MEMBER_BYTES + 1)
    if len(data) > MAX_MEMBER_BYTES:
        raise InputError(f"{path}: is read whole and has more than {MAX_MEMBER_BYTES} bytes; write it as .jsonl")
    return data


@contextmanager
def open_lines(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The lines of a file, decompressed if it ends in .gz or .zst, and the file itself, whose position tells how far.

    Raises InputError if it is damaged.
    """
    try:
        with path.open("rb") as raw:
            if path.suffix.lower() == ".gz":
                with gzip.open(raw) as lines:
                    yield cast(IO[bytes], lines), raw
            elif path.suffix.lower() == ".zst":
                with open_zstd(path, raw) as lines:
                    yield lines, raw
            else:
                yield raw, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: cannot be decompressed ({error}); write it again or remove it") from error


@contextmanager
def open_zstd(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """The decompressed content of a file in zstd's form. Raises InputError if it is damaged."""
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
            yield io.BufferedReader(stream)
    except zstandard.ZstdError as error:
        raise InputError(f"{path}: cannot be decompressed ({error}); write it again or remove it") from error


def tar_rows(key: str, path: Path, field: TextField, first: int = 0) -> Iterator[Row]:
    """The row of each text in an archive, from member `first` on: .txt members, and a field of .json members."""
    size = path.stat().st_size
    try:
        with path.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:*") as archive:
            for number, member in enumerate(islice(archive, first, None), start=first):
                if member.isfile() and member.name.lower().endswith((".txt", ".json")):
                    text = _read_member(archive, member, f"{path}, member {member.name}", field)
                    yield Row(f"{key}#{member.name}", text, min(raw.tell() / size, 1.0), number)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise InputError(f"{path}: cannot be read as tar ({error}); write it again or remove it") from error


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, where: str, field: TextField) -> str:
    if member.size > MAX_MEMBER_BYTES:
        raise InputError(f"{where}: has {member.size} bytes; a document has at most {MAX_MEMBER_BYTES}")
    file = archive.extractfile(member)
    assert file is not None, "it is a regular file"
    try:
        text = file.read().decode("utf-8")
        row = json.loads(text) if member.name.lower().endswith(".json") else {field.name: text}
    except ValueError as error:
        raise InputError(f"{where}: is not UTF-8 text or JSON ({error}); write it again or remove it") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: got a JSON {type(row).__name__}, need an object such as {{'text': '...'}}")
    return row_text(row, field, where)
