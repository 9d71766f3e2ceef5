"""Open a dataset of the Hugging Face hub, and make sure that all of its data is in its own
repository.

The library `datasets` treats some names as readers for files in the working folder. The card of a
repository may name files of this machine, or addresses inside its network, as the data. A run's
config may come from a swarm and a repository from anybody, so such names are refused before
anything is read.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from inner.data.sources.hub import require_on_hub
from inner.errors import InputError
from inner.foreign.files import read_file
from inner.foreign.text import parse_yaml

_NAMES = """
arrow audiofolder cache conll csv eval fasta fastq generator genbank harbor hdf5 iceberg
imagefolder json lance meshfolder mmcif niftifolder pandas parquet pdb pdffolder spark sql text
tsfile videofolder vortex webdataset xml
"""
READERS_OF_FILES = frozenset(_NAMES.split())
"""Names that `datasets` treats as readers of local files instead of looking for them on the hub. A
test compares them with the installed version."""
CSV_CHARACTERS = frozenset(
    {"sep", "delimiter", "quotechar", "escapechar", "comment", "decimal", "thousands"}
)
"""Settings of the CSV reader whose value is a character, such as a backslash, and not a path."""
CARD = "README.md"
SETTINGS = ".huggingface.yaml"
"""The files of a repository that say which files are the data. Values of the second replace values
of the first."""
MAX_CARD_BYTES = 1 << 22
CURE = "use another dataset"
_FRONT_MATTER = re.compile(r"\s*---(?:\r\n|\r|\n)(.*?)(?:\r\n|\r|\n)---", re.DOTALL)


def check_dataset_name(name: str) -> None:
    """Raise InputError if `datasets` would treat the name as a reader of local files."""
    if name in READERS_OF_FILES:
        raise InputError(
            f"data.dataset: {name!r} is not a dataset, but a file reader of the library "
            "`datasets`; for files use data.source=files and data.paths, and for a dataset of the "
            "hub the whole name, OWNER/NAME"
        )


def stream_dataset(
    name: str, folder: Path | None, config: str | None, split: str, cure: str
) -> Any:
    """Return the rows of a split as an IterableDataset, from a repository on the hub or a local
    folder with its files.

    Raises InputError, and any error of `datasets`. Images and recordings are not decoded, because
    decoders open any path that a row names.
    """
    # Imported here because datasets takes a second to import, and only reading a dataset needs it.
    import datasets

    revision = None
    if folder is None:
        check_dataset_name(name)
        revision = require_on_hub("dataset", name, cure)
    for file in (CARD, SETTINGS):
        check_card(name, folder / file if folder else _fetch(name, file, revision))
    builder = datasets.load_dataset_builder(str(folder or name), config, revision=revision)
    if folder is None:
        check_data_files(name, builder.config.data_files or {})
    stream: Any = builder.as_streaming_dataset(split=split)
    return stream.decode(False)


def _fetch(name: str, file: str, revision: str | None) -> Path | None:
    """Return the cached path of a file of the repository, fetched if necessary; None if the
    repository has no such file.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(
            huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=revision)
        )
    except EntryNotFoundError:  # Also raised offline for a file that is not in the cache.
        return None


def check_card(name: str, path: Path | None) -> None:
    """Raise InputError if this file exists and names data outside of its repository."""
    if path is not None and path.is_file():
        text = read_file(path, MAX_CARD_BYTES, CURE).decode(errors="replace")
        check_settings(name, path.name, text if path.name == SETTINGS else front_matter(text))


def front_matter(text: str) -> str:
    """Return the YAML at the beginning of a card; empty if there is none."""
    match = _FRONT_MATTER.match(text)
    return match[1] if match else ""


def check_settings(name: str, file: str, text: str) -> None:
    """Raise InputError if `configs` in this YAML names data outside of the repository."""
    try:
        settings = parse_yaml(text, most_chars=MAX_CARD_BYTES)
    except ValueError as error:
        raise InputError(
            f"dataset {name!r}: {file} is not valid YAML: {str(error)[:200]}; {CURE}"
        ) from None
    configs = settings.get("configs") if isinstance(settings, Mapping) else None
    for place in texts_in(configs):
        if leads_outside(place):
            raise InputError(
                f"dataset {name!r}: {file} names {place[:200]!r} as data, which is outside of its "
                f"repository: it would be read from this machine or its network; {CURE}"
            )


def texts_in(value: object) -> Iterator[str]:
    """Yield all texts in a YAML value, also in nested values. Leaves out settings of the CSV reader
    that are characters.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not (key in CSV_CHARACTERS and isinstance(each, str) and len(each) == 1):
                yield from texts_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)


def leads_outside(place: str) -> bool:
    """Return whether a file pattern is a URL, leads to a parent folder, or is a path on this
    machine.
    """
    return (
        "://" in place
        or "::" in place
        or place.startswith(("/", "~", "\\"))
        or ".." in PurePosixPath(place).parts
    )


def check_data_files(name: str, files: Mapping[str, list[str]]) -> None:
    """Raise InputError if one of the files that `datasets` has found for a split is not in the
    repository.
    """
    for place in (place for found in files.values() for place in found):
        if not str(place).startswith(f"hf://datasets/{name}@"):
            raise InputError(
                f"dataset {name!r}: its data would be read from {str(place)[:200]!r}; {CURE}"
            )
