"""Local files by path, folder or glob pattern: text, JSON Lines, Parquet and tar."""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from inner.data.sources.compressed import DocumentRow, read_whole, tar_rows
from inner.data.sources.documents import Document, Place, TextField, missing_field_error, row_text
from inner.data.sources.find import distinct, find_files, format_of, leave_out_companions
from inner.data.sources.json_rows import json_rows, jsonl_rows
from inner.errors import InputError, refused
from inner.foreign.files import MAX_DOCUMENT_BYTES, open_file

log = logging.getLogger(__name__)

ROWS_PER_READ = 64
"""Number of rows of a Parquet file that are read at a time. A larger number is not faster."""
PAGE_HEADER_BYTES = 16
PAGE_FIELD = 0x15
"""First byte of each field of a page header: the next field of the struct, of type int32."""
DICTIONARY_PAGE = 2
READER = 2
"""Version of this reader. It grows when the same files give a different text, so that the output of
an older version is not used."""


@dataclass(frozen=True)
class FilesSource:
    """Local files. A JSON, Parquet or tar file contains many documents; any other UTF-8 file is one
    document.
    """

    paths: tuple[str, ...]
    field: TextField

    def fingerprint(self) -> object:
        """Return path, size and modification time of every file, and the version of the reader."""
        files = [path for _, path in self._files()]
        return [
            READER,
            *(
                [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
                for path in files
            ),
        ]

    def documents(self) -> Iterator[Document]:
        """Yield documents in the order of `paths`, sorted by path within a folder or pattern."""
        found = False
        for document in self.documents_from([0, 0, 0]):
            found = True
            yield document
        if not found:
            raise InputError(
                f"data.paths {list(self.paths)}: no text in any of the {len(self._files())} files "
                "found; need UTF-8 text, .jsonl, .parquet or .tar files that are not empty"
            )

    def documents_from(self, place: Place) -> Iterator[Document]:
        """Yield the documents from `place` on. A place is the number of a file, and a row and its
        first byte in the file.
        """
        first_file, first_row, first_byte = place
        files, again, left_out = self._find()
        sizes = [path.stat().st_size for _, path in files]
        before = [0, *itertools.accumulate(sizes)]
        whole_size = max(sum(sizes), 1)
        skipped: list[Path] = []
        try:
            for number, (key, path) in enumerate(files[first_file:], start=first_file):
                for row in _rows_of(key, path, self.field, (first_row, first_byte), skipped):
                    if row.text:
                        share = (before[number] + row.share * sizes[number]) / whole_size
                        yield Document(
                            row.key, row.text, share, place=[number, row.number, row.offset]
                        )
                first_row = first_byte = 0
        finally:
            _report(skipped, "not UTF-8 text and skipped")
            _report(again, "named more than once in data.paths and read once")
            _report(
                left_out,
                "left out because its name says that it describes the data beside it; name it in "
                "data.paths to read it",
            )

    def _files(self) -> list[tuple[str, Path]]:
        return self._find()[0]

    def _find(self) -> tuple[list[tuple[str, Path]], list[Path], list[Path]]:
        """Return (key, path) of the files to read, the paths that name one of them again, and the
        files that are left out.
        """
        if not self.paths:
            raise InputError(
                "data.source=files needs data.paths, got none; "
                "name text, .jsonl, .parquet or .tar files, folders or glob patterns"
            )
        found = [leave_out_companions(find_files(entry)) for entry in self.paths]
        files, again = distinct(file for kept, _ in found for file in kept)
        for _, path in files:
            # Refuse unsupported formats now, before the first file is read, and not after hours.
            format_of(path)
        read = {path for _, path in files}
        return (
            files,
            again,
            [path for _, left_out in found for path in left_out if path not in read],
        )


def _rows_of(
    key: str, path: Path, field: TextField, start: tuple[int, int], skipped: list[Path]
) -> Iterator[DocumentRow]:
    """Yield the rows of `_read_rows`, and turn every error into InputError."""
    with refused(f"{path}: cannot be read"):
        yield from _read_rows(key, path, field, start, skipped)


def _read_rows(
    key: str, path: Path, field: TextField, start: tuple[int, int], skipped: list[Path]
) -> Iterator[DocumentRow]:
    """Yield the rows of a file from `start` on: a row's number and first byte. A file that is not
    text is added to `skipped`.
    """
    match format_of(path):
        case "lines":
            return jsonl_rows(key, path, field, start)
        case "json":
            return json_rows(key, path, field, start)
        case "parquet":
            return _parquet_rows(key, path, field, start[0])
        case "tar":
            return tar_rows(key, path, field, start[0])
        case "text":
            return _text_rows(key, path, field, skipped)


def _text_rows(
    key: str, path: Path, field: TextField, skipped: list[Path]
) -> Iterator[DocumentRow]:
    if field.is_chat:
        raise InputError(
            f"{path}: a text file cannot hold conversations; name .jsonl, .parquet or .tar files "
            "only"
        )
    try:
        yield DocumentRow(key, read_whole(path).decode("utf-8"), 1.0)
    except UnicodeDecodeError:
        # Folders of text often contain a few images, which should not stop the run.
        skipped.append(path)


def _report(paths: list[Path], what: str) -> None:
    if len(paths) == 1:
        log.warning("%s is %s", paths[0], what)
    elif paths:
        log.warning("%s and %d more files are %s", paths[0], len(paths) - 1, what)


def _parquet_rows(key: str, path: Path, field: TextField, first: int) -> Iterator[DocumentRow]:
    # Imported here because pyarrow takes half a second to import, and only reading Parquet needs
    # it.
    import pyarrow.parquet

    with refused(f"{path}: cannot be read as Parquet"), pyarrow.parquet.ParquetFile(path) as file:
        if field.name not in file.schema_arrow.names:
            raise missing_field_error(field.name, file.schema_arrow.names, str(path))
        groups, begin = _row_groups_from(
            [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)], first
        )
        batches = file.iter_batches(
            _rows_per_read(path, file, field), row_groups=groups, columns=[field.name]
        )
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in itertools.islice(enumerate(rows, start=begin), first - begin, None):
            text = row_text(row, field, f"{path}, row {number}")
            yield DocumentRow(
                f"{key}#{number}", text, (number + 1) / file.metadata.num_rows, number
            )


def _rows_per_read(path: Path, file: Any, field: TextField) -> int:
    """Return how many rows of a ParquetFile can be read at a time without filling the memory.

    A file may store a long value once and repeat it in every row. Raises InputError if even one row
    does not fit.
    """
    groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    chunks = [
        chunk
        for chunk in columns
        if chunk.num_values and chunk.path_in_schema.split(".")[0] == field.name
    ]
    with open_file(path) as raw:
        longest = max((_longest_value(raw, chunk) for chunk in chunks), default=0)
    if longest > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"{path}: a page has {longest} bytes; at most {MAX_DOCUMENT_BYTES} are read; write it "
            "again"
        )
    return min(ROWS_PER_READ, MAX_DOCUMENT_BYTES // max(longest, 1))


def _longest_value(raw: IO[bytes], chunk: Any) -> int:
    """Return the size in bytes of the longest value that a column chunk may store once and repeat;
    0 if it repeats none.
    """
    repeats = set(chunk.encodings) - {
        "PLAIN",
        "RLE",
        "BIT_PACKED",
        "RLE_DICTIONARY",
        "PLAIN_DICTIONARY",
    }
    first = chunk.dictionary_page_offset or chunk.data_page_offset
    raw.seek(min(first, chunk.data_page_offset))
    is_dictionary, num_bytes = _parse_page_header(raw.read(PAGE_HEADER_BYTES))
    return max(num_bytes if is_dictionary else 0, chunk.total_uncompressed_size if repeats else 0)


def _parse_page_header(header: bytes) -> tuple[bool, int]:
    """Return whether a Parquet page is a dictionary, and its decompressed size in bytes. Raises
    ValueError.

    The header is a struct in Thrift's compact format: in turn, a byte for field and type, and a
    number with 7 bits per byte.
    """
    numbers = []
    at = 0
    for _ in ("type", "size"):
        if header[at] != PAGE_FIELD:
            raise ValueError("a page has no header")
        number = 0
        shift = 0
        at = at + 1
        while header[at] & 0x80:
            number = number | (header[at] & 0x7F) << shift
            shift = shift + 7
            at = at + 1
        numbers.append((number | header[at] << shift) >> 1)
        at += 1
    return numbers[0] == DICTIONARY_PAGE, numbers[1]


def _row_groups_from(sizes: list[int], first: int) -> tuple[list[int], int]:
    """Return the row groups from the one that contains row `first` on, and the number of their
    first row.
    """
    ends = list(itertools.accumulate(sizes))
    group = next((number for number, end in enumerate(ends) if end > first), len(sizes))
    return list(range(group, len(sizes))), sum(sizes[:group])
