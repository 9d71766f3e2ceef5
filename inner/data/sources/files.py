"""Local files by path, folder or glob pattern: text, JSON Lines and Parquet."""

import glob
import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inner.data.documents import Document, missing_field, row_text
from inner.errors import InputError

log = logging.getLogger(__name__)

ROWS_PER_READ = 1024

Row = tuple[str, str, float]
"""Key and text of a document, and the share of its file that has been read with it."""


@dataclass(frozen=True)
class FilesSource:
    """.jsonl and .parquet files give a document per row, every other UTF-8 file is one document."""

    paths: tuple[str, ...]
    text_field: str

    def fingerprint(self) -> object:
        """Path, size and time of change of every file."""
        files = [path for _, path in self._files()]
        return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]

    def documents(self) -> Iterator[Document]:
        """Documents in the order of `paths`, within a folder or pattern by path."""
        files = self._files()
        sizes = [path.stat().st_size for _, path in files]
        found, size_read, whole_size = False, 0, max(sum(sizes), 1)
        for (key, path), size in zip(files, sizes, strict=True):
            for row_key, text, file_share in _read(key, path, self.text_field):
                if text:
                    found = True
                    yield Document(row_key, text, (size_read + file_share * size) / whole_size)
            size_read += size
        if not found:
            raise InputError(
                f"data.paths {list(self.paths)}: no text in any of the files found, {len(files)} in all; "
                "need UTF-8 text, .jsonl or .parquet files that are not empty"
            )

    def _files(self) -> list[tuple[str, Path]]:
        if not self.paths:
            raise InputError(
                "data.source=files needs data.paths, got none; "
                "name text, .jsonl or .parquet files, folders or glob patterns"
            )
        return [file for entry in self.paths for file in find_files(entry)]


def find_files(entry: str) -> list[tuple[str, Path]]:
    """(key, path) of the files that one entry of data.paths names. InputError: there are none.

    The key is relative to what the entry fixes, so that islands which keep the same
    folder in different places hold out the same files:
        data/a.txt -> a.txt      data -> sub/a.txt      data/*/a.txt -> sub/a.txt
    """
    path = Path(entry).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        return _relative(path, sorted(path.rglob("*")), entry)
    if glob.has_magic(entry):
        return _relative(_fixed_part(path), sorted(map(Path, glob.glob(str(path), recursive=True))), entry)
    raise InputError(f"data.paths: {entry!r} does not exist (looked in {Path.cwd()}); correct the path")


def _fixed_part(pattern: Path) -> Path:
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))


def _relative(folder: Path, paths: list[Path], entry: str) -> list[tuple[str, Path]]:
    keys = ((path.relative_to(folder), path) for path in paths if path.is_file())
    files = [(key.as_posix(), path) for key, path in keys if not any(p.startswith(".") for p in key.parts)]
    if not files:
        raise InputError(
            f"data.paths: {entry!r} matches no file (looked in {Path.cwd()}; hidden files do not count); "
            "name a folder or a pattern with text, .jsonl or .parquet files in it"
        )
    return files


def _read(key: str, path: Path, text_field: str) -> Iterator[Row]:
    if path.suffix == ".jsonl":
        return _jsonl_rows(key, path, text_field)
    if path.suffix == ".parquet":
        return _parquet_rows(key, path, text_field)
    return _text_file(key, path)


def _text_file(key: str, path: Path) -> Iterator[Row]:
    try:
        yield key, path.read_bytes().decode("utf-8"), 1.0
    except UnicodeDecodeError:
        # A folder of text often holds a picture or two: no reason to stop.
        log.warning("%s is not UTF-8 text: left out", path)


def _jsonl_rows(key: str, path: Path, text_field: str) -> Iterator[Row]:
    size, size_read = path.stat().st_size, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            size_read += len(line)
            if not line.strip():
                continue
            where = f"{path}, line {number + 1}"
            yield f"{key}#{number}", row_text(_json_object(line, where), text_field, where), size_read / size


def _json_object(line: bytes, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}); a .jsonl file holds one object a line") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: got a JSON {type(row).__name__}, need an object such as {{'text': '...'}}")
    return row


def _parquet_rows(key: str, path: Path, text_field: str) -> Iterator[Row]:
    # pyarrow takes half a second to import: only who reads Parquet pays for it.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                raise missing_field(text_field, file.schema_arrow.names, str(path))
            batches = file.iter_batches(ROWS_PER_READ, columns=[text_field])
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows):
                text = row_text(row, text_field, f"{path}, row {number}")
                yield f"{key}#{number}", text, (number + 1) / file.metadata.num_rows
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: cannot be read as Parquet ({error}); write it again or leave it out") from error
