"""Find and hash the weights files of a model folder. No torch here."""

import hashlib
import os
from pathlib import Path

from inner.errors import InputError, refused
from inner.foreign.files import open_file
from inner.foreign.text import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 1 << 22
"""Size limit of the header of a safetensors file. A tensor takes some 130 bytes of it."""


def weights_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, sorted by name. Raises InputError if there are none
    or one is missing.
    """
    with refused(f"{folder}: cannot be read", "copy it again"):
        return _find_weights(folder)


def _find_weights(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = _read_index(folder / INDEX)
    elif (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        others = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
        raise InputError(
            f"{folder}: no {WEIGHTS} and no {INDEX}; found {', '.join(others[:8]) or 'nothing'}. "
            "Only safetensors are read: other formats are pickles, which can run code"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder}: {INDEX} names files that are missing: {', '.join(missing)}; copy them too"
        )
    return [folder / name for name in names]


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 of the concatenated weights files, sorted by name. For a single file it
    equals sha256sum.
    """
    digest = hashlib.sha256()
    for path in weights_files(folder):
        with open_file(path) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def check_header(path: Path) -> None:
    """Raise InputError if the header of a safetensors file is missing or too long. May raise
    OSError.

    The library would read all of a header's tensors, perhaps millions, before it reports how many
    there are.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
    if size < 8 + length:
        raise InputError(f"{path}: has {size} bytes, fewer than its header; copy it again")
    if length > MAX_HEADER_BYTES:
        raise InputError(
            f"{path}: its header has {length} bytes; at most {MAX_HEADER_BYTES} are read, use "
            "other weights"
        )


def _read_index(index: Path) -> list[str]:
    """Return the sorted file names in an index. Raises InputError if it is damaged or names a path
    outside its folder.
    """
    try:
        names = sorted(
            set(read_json(index, "an index of safetensors files")["weight_map"].values())
        )
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index}: not an index of safetensors files ({error!r}); copy it again"
        ) from None
    invalid = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if invalid:
        raise InputError(
            f"{index}: {invalid[0]!r:.100} is not the name of a file next to it; copy it again"
        )
    return names
