"""Any Hugging Face dataset by name, or a local folder of one, read as a stream."""

import gc
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from inner.data.documents import Document, row_text
from inner.data.hub import one_line, require_on_hub
from inner.data.source_files import find_files
from inner.errors import InputError

CURE = (
    "check data.dataset, data.dataset_config, data.split and the network, "
    "or use data.source=files or data.source=python-stdlib"
)


@dataclass(frozen=True)
class HuggingFaceSource:
    """The rows of one split, in the stream's order."""

    dataset: str
    dataset_config: str | None
    split: str
    text_field: str

    def fingerprint(self) -> object:
        """Path, size and time of change of the files when the dataset is a local folder."""
        if not self._is_local():
            return None
        stats = [(key, path.stat()) for key, path in find_files(self.dataset)]
        return [[key, stat.st_size, stat.st_mtime_ns] for key, stat in stats]

    def documents(self) -> Iterator[Document]:
        """One document per row; the key holds the split and the row, not where the dataset lies."""
        name = Path(self.dataset).name if self._is_local() else self.dataset
        prefix = "/".join(filter(None, [name, self.dataset_config, self.split]))
        found = False
        with closing(self._rows()) as rows:
            for number, row in enumerate(rows):
                text = row_text(row, self.text_field, f"dataset {prefix}, row {number}")
                if text:
                    found = True
                    yield Document(f"{prefix}#{number}", text)
        if not found:
            raise InputError(f"dataset {prefix}: the split holds no text; choose another data.split")

    def _rows(self) -> Generator[Mapping[str, object], None, None]:
        if not self._is_local():
            require_on_hub("dataset", self.dataset, CURE)
        # datasets takes a second to import: only who reads one pays for it.
        import datasets

        try:
            yield from datasets.load_dataset(self.dataset, self.dataset_config, split=self.split, streaming=True)
        except Exception as error:
            # Builders, file systems and HTTP libraries each raise their own kind; all mean: not to be had.
            where = f"dataset {self.dataset!r} (config {self.dataset_config!r}, split {self.split!r})"
            raise InputError(f"{where} cannot be read: {one_line(error)}; {CURE}") from error
        finally:
            # An Arrow reader that is left in the middle keeps threads that may abort the interpreter when it exits.
            gc.collect()

    def _is_local(self) -> bool:
        return Path(self.dataset).is_dir()
