"""Rows in JSON: one object per line, or an array of objects."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic_core import from_json

from inner.data.sources.compressed import DocumentRow, open_lines, read_whole
from inner.data.sources.documents import TextField, row_text
from inner.errors import InputError
from inner.foreign.files import MAX_DOCUMENT_BYTES, lines_of
from inner.foreign.text import FREE_BYTES, parse_json


def jsonl_rows(
    key: str, path: Path, field: TextField, start: tuple[int, int]
) -> Iterator[DocumentRow]:
    """Yield a row per line, from `start` on: a row's number and first byte. Raises InputError if a
    line is not an object.
    """
    size = path.stat().st_size
    first, offset = start
    with open_lines(path) as (lines, raw):
        is_plain = lines is raw
        if is_plain:
            raw.seek(offset)
        skipped = 0 if is_plain else first
        following = itertools.islice(lines_of(lines, MAX_DOCUMENT_BYTES), skipped, None)
        for number, line in enumerate(following, start=first):
            if len(line) > MAX_DOCUMENT_BYTES:
                raise _too_long(path, number)
            end = offset + len(line)
            if not line.isspace():
                where = f"{path}, line {number + 1}"
                row = _object(_parse_line(line, where), where)
                share = (end if is_plain else raw.tell()) / size
                yield DocumentRow(
                    f"{key}#{number}", row_text(row, field, where), share, number, offset
                )
            offset = end if is_plain else 0


def json_rows(
    key: str, path: Path, field: TextField, start: tuple[int, int]
) -> Iterator[DocumentRow]:
    """Yield the rows of a .json file: the items of its array, its lines as in a .jsonl file, or its
    only object.
    """
    if _begins_with_a_row(path):
        return jsonl_rows(key, path, field, start)
    return _item_rows(key, path, field, start[0])


def _begins_with_a_row(path: Path) -> bool:
    with open_lines(path) as (lines, _):
        following = enumerate(lines_of(lines, MAX_DOCUMENT_BYTES))
        number, first = next(
            ((number, line) for number, line in following if line.strip()), (0, b"{}")
        )
    if len(first) > MAX_DOCUMENT_BYTES:
        raise _too_long(path, number)
    try:
        return first.lstrip().startswith(b"{") and isinstance(parse_json(first), dict)
    except ValueError:
        return False


def _too_long(path: Path, number: int) -> InputError:
    return InputError(
        f"{path}: line {number + 1} has more than {MAX_DOCUMENT_BYTES} bytes; a document has fewer"
    )


def _item_rows(key: str, path: Path, field: TextField, first: int) -> Iterator[DocumentRow]:
    content = _parse(
        read_whole(path),
        str(path),
        "a .json file holds an array of objects, or one object per line",
    )
    items = content if isinstance(content, list) else [content]
    for number, item in itertools.islice(enumerate(items), first, None):
        where = f"{path}, item {number + 1}"
        text = row_text(_object(item, where), field, where)
        yield DocumentRow(f"{key}#{number}", text, (number + 1) / len(items), number)


def _parse_line(line: bytes, where: str) -> object:
    """Return the value of a line. The fast parser refuses some texts that Python's parser takes,
    such as lone surrogates, and never gives another value.
    """
    if len(line) < FREE_BYTES:
        with suppress(ValueError):
            return from_json(line)
    return _parse(line, where, "a line holds one object")


def _parse(data: bytes, where: str, expected: str) -> object:
    try:
        return parse_json(data)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}); {expected}") from error


def _object(row: object, where: str) -> dict[str, object]:
    if not isinstance(row, dict):
        raise InputError(
            f"{where}: got a JSON {type(row).__name__}, need an object such as {{'text': '...'}}"
        )
    return row
