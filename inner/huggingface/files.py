"""Which files of a folder hold the weights, and their hash. No torch here."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from inner.errors import InputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
READ_BYTES = 1 << 22


def weights_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, by name. Raises InputError when there are none or one is missing."""
    if (folder / INDEX).is_file():
        names = _indexed(folder / INDEX)
    elif (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        others = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
        raise InputError(
            f"{folder}: no {WEIGHTS} and no {INDEX}; found {', '.join(others[:8]) or 'nothing'}. Only safetensors are "
            "read: other files of weights are programs (pickle)"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder}: {INDEX} names files that are not there: {', '.join(missing)}; copy them, too")
    return [folder / name for name in names]


def weights_sha256(folder: Path) -> str:
    """SHA-256 of the bytes of the weights' files, one after the other by name; of one file, what sha256sum says."""
    return sha256_of(weights_files(folder))


def sha256_of(files: Sequence[Path]) -> str:
    """SHA-256 of the files' bytes, one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _indexed(index: Path) -> list[str]:
    """The names of the files in an index."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: no index of safetensors files ({error!r}); copy it again") from None
    strange = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if strange:
        raise InputError(f"{index}: {strange[0]!r} is no name of a file beside it; copy it again")
    return names
