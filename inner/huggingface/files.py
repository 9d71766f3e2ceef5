"""Finds and hashes the weights files of a model folder. No torch here."""

import hashlib
import json
from pathlib import Path

from inner.errors import InputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weights_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, sorted by name. Raises InputError if there are none or one is missing."""
    if (folder / INDEX).is_file():
        names = _read_index(folder / INDEX)
    elif (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        others = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
        raise InputError(
            f"{folder}: no {WEIGHTS} and no {INDEX}; found {', '.join(others[:8]) or 'nothing'}. Only safetensors are "
            "read: other formats are pickles, which can run code"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder}: {INDEX} names files that are missing: {', '.join(missing)}; copy them too")
    return [folder / name for name in names]


def weights_sha256(folder: Path) -> str:
    """SHA-256 of the concatenated weights files, sorted by name. For a single file it equals sha256sum."""
    digest = hashlib.sha256()
    for path in weights_files(folder):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _read_index(index: Path) -> list[str]:
    """Sorted file names in an index. Raises InputError if the index is damaged or names a path outside its folder."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: not an index of safetensors files ({error!r}); copy it again") from None
    invalid = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if invalid:
        raise InputError(f"{index}: {invalid[0]!r} is not the name of a file next to it; copy it again")
    return names
