"""Local files by path, folder or glob pattern: text, JSON Lines, Parquet and tar."""

import glob
import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inner.data.sources.compressed import Row, open_lines, tar_rows
from inner.data.sources.documents import Document, Place, TextField, missing_field_error, row_text
from inner.errors import InputError

log = logging.getLogger(__name__)

ROWS_PER_READ = 1024


@dataclass(frozen=True)
class FilesSource:
    """Local files. A .jsonl, .parquet or .tar holds many documents; any other UTF-8 file is one."""

    paths: tuple[str, ...]
    field: TextField

    def fingerprint(self) -> object:
        """Path, size and modification time of every file."""
        files = [path for _, path in self._files()]
        return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]

    def documents(self) -> Iterator[Document]:
        """Yield documents in the order of `paths`, and sorted by path within a folder or pattern."""
        found = False
        for document in self.documents_from([0, 0, 0]):
            found = True
            yield document
        if not found:
            raise InputError(
                f"data.paths {list(self.paths)}: no text in any of the {len(self._files())} files found; "
                "need UTF-8 text, .jsonl, .parquet or .tar files that are not empty"
            )

    def documents_from(self, place: Place) -> Iterator[Document]:
        """The documents from one on, by the number of its file, and its row and first byte in that file."""
        first_file, first_row, first_byte = place
        files = self._files()
        sizes = [path.stat().st_size for _, path in files]
        before, whole_size = [0, *itertools.accumulate(sizes)], max(sum(sizes), 1)
        skipped: list[Path] = []
        try:
            for number, (key, path) in enumerate(files[first_file:], start=first_file):
                for row in _read_rows(key, path, self.field, (first_row, first_byte), skipped):
                    if row.text:
                        share = (before[number] + row.share * sizes[number]) / whole_size
                        yield Document(row.key, row.text, share, place=[number, row.number, row.offset])
                first_row = first_byte = 0
        finally:
            _report_skipped(skipped)

    def _files(self) -> list[tuple[str, Path]]:
        if not self.paths:
            raise InputError(
                "data.source=files needs data.paths, got none; "
                "name text, .jsonl, .parquet or .tar files, folders or glob patterns"
            )
        return [file for entry in self.paths for file in find_files(entry)]


def find_files(entry: str) -> list[tuple[str, Path]]:
    """(key, path) of the files that match one entry of data.paths. Raises InputError if there are none.

    Keys are relative to the literal part of the entry, so islands that keep the same folder in different places hold
    out the same files:
        data/a.txt -> a.txt      data -> sub/a.txt      data/*/a.txt -> sub/a.txt
    """
    path = Path(entry).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        return _relative_to(path, sorted(path.rglob("*")), entry)
    if glob.has_magic(entry):
        literal = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        return _relative_to(literal, sorted(map(Path, glob.glob(str(path), recursive=True))), entry)
    raise InputError(f"data.paths: {entry!r} does not exist (looked in {Path.cwd()}); correct the path")


def _relative_to(folder: Path, paths: list[Path], entry: str) -> list[tuple[str, Path]]:
    keys = ((path.relative_to(folder), path) for path in paths if path.is_file())
    files = [(key.as_posix(), path) for key, path in keys if not any(p.startswith(".") for p in key.parts)]
    if not files:
        raise InputError(
            f"data.paths: {entry!r} matches no file (looked in {Path.cwd()}; hidden files do not count); "
            "name a folder or a pattern with text, .jsonl, .parquet or .tar files in it"
        )
    return files


def _read_rows(key: str, path: Path, field: TextField, start: tuple[int, int], skipped: list[Path]) -> Iterator[Row]:
    """The rows of a file from one on, by its number and first byte. A file that is no text is added to `skipped`."""
    if path.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        return _jsonl_rows(key, path, field, start)
    if path.suffix == ".parquet":
        return _parquet_rows(key, path, field, start[0])
    if path.name.endswith((".tar", ".tar.gz", ".tgz")):
        return tar_rows(key, path, field, start[0])
    if field.is_chat:
        raise InputError(f"{path}: a file of text holds no conversations; name .jsonl, .parquet or .tar files only")
    return _text_rows(key, path, skipped)


def _text_rows(key: str, path: Path, skipped: list[Path]) -> Iterator[Row]:
    try:
        yield Row(key, path.read_bytes().decode("utf-8"), 1.0)
    except UnicodeDecodeError:
        # Folders of text often contain a few images, which are no reason to stop.
        skipped.append(path)


def _report_skipped(paths: list[Path]) -> None:
    if len(paths) == 1:
        log.warning("%s is not UTF-8 text and is skipped", paths[0])
    elif paths:
        log.warning("%d files are not UTF-8 text and are skipped, the first of them %s", len(paths), paths[0])


def _jsonl_rows(key: str, path: Path, field: TextField, start: tuple[int, int]) -> Iterator[Row]:
    size = path.stat().st_size
    first, offset = start
    with open_lines(path) as (lines, raw):
        is_plain = lines is raw
        if is_plain:
            raw.seek(offset)
        else:
            lines = itertools.islice(lines, first, None)
        for number, line in enumerate(lines, start=first):
            if line.strip():
                where = f"{path}, line {number + 1}"
                text = row_text(_json_object(line, where), field, where)
                yield Row(f"{key}#{number}", text, raw.tell() / size, number, offset)
            offset += len(line) if is_plain else 0


def _json_object(line: bytes, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}); a .jsonl file holds one object a line") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: got a JSON {type(row).__name__}, need an object such as {{'text': '...'}}")
    return row


def _parquet_rows(key: str, path: Path, field: TextField, first: int) -> Iterator[Row]:
    # Imported here because pyarrow takes half a second, which only readers of Parquet should pay.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field.name not in file.schema_arrow.names:
                raise missing_field_error(field.name, file.schema_arrow.names, str(path))
            groups, begin = _row_groups_from(
                [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)], first
            )
            batches = file.iter_batches(ROWS_PER_READ, row_groups=groups, columns=[field.name])
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in itertools.islice(enumerate(rows, start=begin), first - begin, None):
                text = row_text(row, field, f"{path}, row {number}")
                yield Row(f"{key}#{number}", text, (number + 1) / file.metadata.num_rows, number)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: cannot be read as Parquet ({error}); write it again or remove it") from error


def _row_groups_from(sizes: list[int], first: int) -> tuple[list[int], int]:
    """The row groups that hold row `first` and those after it, and the number of their first row."""
    ends = list(itertools.accumulate(sizes))
    group = next((number for number, end in enumerate(ends) if end > first), len(sizes))
    return list(range(group, len(sizes))), sum(sizes[:group])
