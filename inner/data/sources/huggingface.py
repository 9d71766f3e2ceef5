"""A Hugging Face dataset, by name or as a local folder, read as a stream."""

import gc
import logging
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from inner.data.sources.documents import Document, Place, TextField, row_text
from inner.data.sources.find import find_files
from inner.data.sources.hub_dataset import stream_dataset
from inner.errors import InputError, refused
from inner.files import home_path

log = logging.getLogger(__name__)

CURE = (
    "check data.dataset, data.dataset_config, data.split and the network, "
    "or use data.source=files or data.source=python-stdlib"
)

FROM_THE_BEGINNING = 0, 0


class RowPlace(NamedTuple):
    """The place of a row in a split."""

    number: int
    """Number of the row in the whole split."""
    file: int
    """Number of the file with the row; -1 if the library does not report it."""
    row: int
    """Number of the row in its file."""
    checksum: int
    """CRC-32 of the row's text."""


@dataclass(frozen=True)
class HuggingFaceSource:
    """The rows of one split of a dataset, in the order of the stream."""

    dataset: str
    dataset_config: str | None
    split: str
    field: TextField

    def fingerprint(self) -> object:
        """Return path, size and modification time of the files of a local dataset; None for a
        dataset on the hub.
        """
        if not self._is_local():
            return None
        stats = [(key, path.stat()) for key, path in find_files(self.dataset)]
        return [[key, stat.st_size, stat.st_mtime_ns] for key, stat in stats]

    def documents(self) -> Iterator[Document]:
        """Yield one document per row. Its key contains the dataset's name, split and row, but not
        its location on disk.
        """
        found = False
        for _, document in self._documents(0, FROM_THE_BEGINNING):
            if document.text:
                found = True
                yield document
        if not found:
            raise InputError(
                f"dataset {self._name}: the split holds no text; choose another data.split"
            )

    def documents_from(self, place: Place) -> Iterator[Document]:
        """Yield the document at a place and all documents after it. Earlier files are not read.

        The row found at the place must be the row that was there before; otherwise all rows are
        read from the beginning. This is checked because file numbers come from internal state of
        the library.
        """
        wanted = RowPlace(*place)
        with closing(self._documents(wanted.number, (wanted.file, wanted.row))) as found:
            first = next(found, None)
            if first is not None and first[0] == wanted:
                yield first[1]
                yield from (document for _, document in found if document.text)
                return
        log.warning(
            "dataset %s: row %d has moved to another place; reading from the beginning",
            self._name,
            wanted.number,
        )
        all_rows = islice(self._documents(0, FROM_THE_BEGINNING), wanted.number, None)
        yield from (document for _, document in all_rows if document.text)

    def _documents(
        self, number: int, begin: tuple[int, int]
    ) -> Generator[tuple[RowPlace, Document], None, None]:
        """Yield all rows, also empty ones, from `begin` on, which is a file and a row in it.
        `number`: number of the first row.
        """
        with closing(self._rows(*begin)) as rows:
            for row_number, (file, row_in_file, row) in enumerate(rows, start=number):
                text = row_text(row, self.field, f"dataset {self._name}, row {row_number}")
                place = RowPlace(
                    row_number, file, row_in_file, zlib.crc32(text.encode("utf-8", "replace"))
                )
                yield (
                    place,
                    Document(
                        f"{self._name}#{row_number}", text, place=None if file < 0 else [*place]
                    ),
                )

    @property
    def _name(self) -> str:
        name = Path(self.dataset).name if self._is_local() else self.dataset
        return "/".join(filter(None, [name, self.dataset_config, self.split]))

    def _rows(
        self, file: int, row: int
    ) -> Generator[tuple[int, int, Mapping[str, object]], None, None]:
        """Yield (file number, row number in the file, row) from a row of a file on."""
        where = f"dataset {self.dataset!r} (config {self.dataset_config!r}, split {self.split!r})"
        try:
            # Builders, file systems and HTTP libraries each raise exceptions of their own.
            with refused(f"{where} cannot be read", CURE):
                yield from _rows_from(self._open(), file, row)
        finally:
            # An abandoned Arrow reader keeps threads that may abort the interpreter at exit.
            gc.collect()

    def _open(self) -> Any:
        folder = self._place if self._is_local() else None
        return stream_dataset(self.dataset, folder, self.dataset_config, self.split, CURE)

    def _is_local(self) -> bool:
        return self._place.is_dir()

    @property
    def _place(self) -> Path:
        return home_path(self.dataset, "data.dataset")


def _rows_from(
    stream: Any, first_file: int, first_row: int
) -> Iterator[tuple[int, int, Mapping[str, object]]]:
    """Yield (file number, row number in the file, row) of an IterableDataset from a row of a file
    on.
    """
    if first_file:
        _files_of(state := stream.state_dict())["shard_idx"] = first_file
        stream.load_state_dict(state)
    file = first_file
    number = first_row - 1
    for row in islice(stream, first_row, None):
        now = _files_of(stream.state_dict()).get("shard_idx", -1)
        number = number + 1 if now == file else 0
        file = now
        yield file, number, row


def _files_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an IterableDataset's state that counts files. It is the innermost of the
    nested states.
    """
    while isinstance(state.get("examples_iterable"), dict):
        state = state["examples_iterable"]
    return state
