"""A Hugging Face dataset, by name or as a local folder, read as a stream."""

import gc
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from inner.data.sources.documents import Document, TextField, row_text
from inner.data.sources.files import find_files
from inner.data.sources.hub import require_on_hub
from inner.errors import InputError, summarise

CURE = (
    "check data.dataset, data.dataset_config, data.split and the network, "
    "or use data.source=files or data.source=python-stdlib"
)


@dataclass(frozen=True)
class HuggingFaceSource:
    """The rows of one split of a dataset, in the order of the stream."""

    dataset: str
    dataset_config: str | None
    split: str
    field: TextField

    def fingerprint(self) -> object:
        """Path, size and modification time of the files of a local dataset; None for a dataset on the hub."""
        if not self._is_local():
            return None
        stats = [(key, path.stat()) for key, path in find_files(self.dataset)]
        return [[key, stat.st_size, stat.st_mtime_ns] for key, stat in stats]

    def documents(self) -> Iterator[Document]:
        """Yield one document per row. Its key has the dataset's name, split and row, but not its location on disk."""
        name = Path(self.dataset).name if self._is_local() else self.dataset
        prefix = "/".join(filter(None, [name, self.dataset_config, self.split]))
        found = False
        with closing(self._rows()) as rows:
            for number, row in enumerate(rows):
                text = row_text(row, self.field, f"dataset {prefix}, row {number}")
                if text:
                    found = True
                    yield Document(f"{prefix}#{number}", text)
        if not found:
            raise InputError(f"dataset {prefix}: the split holds no text; choose another data.split")

    def _rows(self) -> Generator[Mapping[str, object], None, None]:
        if not self._is_local():
            require_on_hub("dataset", self.dataset, CURE)
        # Imported here because datasets takes a second, which only readers of a dataset should pay.
        import datasets

        try:
            yield from datasets.load_dataset(self.dataset, self.dataset_config, split=self.split, streaming=True)
        except Exception as error:
            # Builders, file systems and HTTP libraries each raise exceptions of their own.
            where = f"dataset {self.dataset!r} (config {self.dataset_config!r}, split {self.split!r})"
            raise InputError(f"{where} cannot be read: {summarise(error)}; {CURE}") from error
        finally:
            # An abandoned Arrow reader keeps threads that may abort the interpreter at exit.
            gc.collect()

    def _is_local(self) -> bool:
        return Path(self.dataset).is_dir()
