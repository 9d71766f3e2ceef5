"""Find the files that an entry of data.paths names, and recognise their format by the end of their
names.

docs/data.md has a table of the formats.
"""

import glob
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NoReturn

from inner.errors import InputError
from inner.files import CACHE_TAG, home_path

Format = Literal["lines", "json", "parquet", "tar", "text"]

ROWS: dict[str, Format] = {
    **dict.fromkeys(
        (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst"), "lines"
    ),
    **dict.fromkeys((".json", ".json.gz", ".json.zst"), "json"),
    ".parquet": "parquet",
    **dict.fromkeys((".tar", ".tar.gz", ".tgz"), "tar"),
}
TABLES = tuple(
    f"{table}{compression}"
    for table in (".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".xlsx")
    for compression in ("", ".gz", ".zst")
)
PACKED = (".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar.zst", ".parquet.gz", ".parquet.zst")

ABOUT_DATA = ("readme", "license", "licence", "notice", "citation", "changelog")
"""File names, up to the first dot, of texts that describe the data beside them."""
SETTINGS_OF_DATA = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "croissant.json",
    "state.json",
)


def find_files(entry: str) -> list[tuple[str, Path]]:
    """Return (key, path) of the files that match one entry of data.paths. Raises InputError if
    there are none.

    Keys are relative to the literal part of the entry, so islands that keep the same folder in
    different places hold out the same files:

        data/a.txt -> a.txt      data -> sub/a.txt      data/*/a.txt -> sub/a.txt

    Folders behind symbolic links are read, too. A file that can be reached by several paths is
    returned once, with the shortest path.
    """
    path = home_path(entry, "data.paths")
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        return _relative_to(path, sorted(_walk(path)), entry)
    if glob.has_magic(entry):
        literal = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        return _relative_to(literal, sorted(map(Path, glob.glob(str(path), recursive=True))), entry)
    if path.exists():
        raise InputError(
            f"data.paths: {entry!r} is a FIFO, a device or a socket; write its output to a file"
        )
    raise InputError(
        f"data.paths: {entry!r} does not exist (looked in {Path.cwd()}); correct the path"
    )


def distinct(files: Iterable[tuple[str, Path]]) -> tuple[list[tuple[str, Path]], list[Path]]:
    """Return (key, path) of each file at its first occurrence, by its real path, and the paths of
    all later occurrences.
    """
    first = {}
    again = []
    for key, path in files:
        real = path.resolve()
        if real in first:
            again.append(path)
        else:
            first[real] = key, path
    return list(first.values()), again


def _walk(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders, except hidden ones. Each folder is read
    once, by its shortest path.
    """
    files = []
    level = [folder]
    entered = set()
    while level:
        below = []
        for place in sorted(level):
            if (real := place.resolve()) not in entered:
                entered.add(real)
                for path in _list(place):
                    (below if path.is_dir() else files).append(path)
        level = below
    return files


def _list(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise InputError(
            f"data.paths: the folder {str(folder)!r} cannot be listed ({error}); give this user "
            "permission to read it"
        ) from error


def _relative_to(folder: Path, paths: list[Path], entry: str) -> list[tuple[str, Path]]:
    keys = ((path.relative_to(folder), path) for path in paths if path.is_file())
    files = [
        (key.as_posix(), path)
        for key, path in keys
        if not _is_hidden(key) and not _is_cached(folder, key)
    ]
    if not files:
        raise InputError(
            f"data.paths: {entry!r} matches no file (looked in {Path.cwd()}; hidden files do not "
            "count); name a folder or a pattern with text, .jsonl, .parquet or .tar files in it"
        )
    by_length, _ = distinct(sorted(files, key=lambda file: len(file[1].parts)))
    kept = set(by_length)
    return [file for file in files if file in kept]


def _is_hidden(key: Path) -> bool:
    return any(part.startswith(".") for part in key.parts)


def _is_cached(folder: Path, key: Path) -> bool:
    """Return whether the file lies in a cache below the folder, such as this program's own
    island.cache_dir.
    """
    return any((folder / parent / CACHE_TAG).exists() for parent in key.parents if parent.parts)


def format_of(path: Path) -> Format:
    """Return how the file is read; `text` by default. Raises InputError for a data format that is
    not supported.
    """
    name = path.name.lower()
    if name.endswith(TABLES):
        _refuse(path, "a table in this format", "write it as .jsonl or .parquet")
    if name.endswith(PACKED):
        _refuse(
            path,
            "a file compressed in this format",
            "unpack it, or write it as .jsonl.gz, .jsonl.zst or .tar.gz",
        )
    for end, rows in ROWS.items():
        if name.endswith(end):
            return rows
    return "text"


def leave_out_companions(
    files: list[tuple[str, Path]],
) -> tuple[list[tuple[str, Path]], list[Path]]:
    """Return (key, path) of the files to read, and the files to leave out, which are texts that
    describe the data beside them.
    """
    companions = [path for _, path in files if _is_companion(path)]
    if not _have_rows(path for _, path in files if path not in companions):
        return files, []
    return [(key, path) for key, path in files if path not in companions], companions


def _is_companion(path: Path) -> bool:
    name = path.name.lower()
    is_text = not name.endswith((*ROWS, *TABLES, *PACKED))
    return name in SETTINGS_OF_DATA or (is_text and name.split(".")[0] in ABOUT_DATA)


def _have_rows(paths: Iterable[Path]) -> bool:
    return any(path.name.lower().endswith((*ROWS, *TABLES)) for path in paths)


def _refuse(path: Path, what: str, cure: str) -> NoReturn:
    raise InputError(
        f"{path}: {what} is not read by data.source=files; {cure}, or name the other files by a "
        "pattern such as *.txt"
    )
