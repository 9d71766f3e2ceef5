"""Reads the file that a command names, and offers the nearest one if it is not there. Importing
this does not import torch.
"""

import difflib
from pathlib import Path

from diloco.errors import ConfigError

MOST_NAMED = 5
"""Files that an error names at most."""


def read_yaml_text(path: Path, what: str) -> str:
    """Return the text of a YAML file of the user's; `what` is what it should hold, for example
    "config". Raises ConfigError, with the nearest file's name if there is none at `path`.
    """
    try:
        return path.read_text()
    except OSError as error:
        hint = _hint(path)
        raise ConfigError(f"cannot read the {what} {str(path)!r}: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} is not text in UTF-8; a {what} is a YAML file, like those in configs/"
        ) from None


def _hint(path: Path) -> str:
    """Return which file may have been meant, with a semicolon in front; empty if none is near."""
    if path.is_dir():
        return _list_files(path)
    if not path.parent.is_dir():
        return f"; there is no folder {str(path.parent)!r}"
    # Only stems are compared: a missing or different ending is a mistake of its own.
    files = {file.stem: file for file in _yaml_files(path.parent)}
    near = difflib.get_close_matches(path.stem, files, n=1, cutoff=0.7)
    return f"; did you mean {str(files[near[0]])!r}?" if near else _list_files(path.parent)


def _list_files(folder: Path) -> str:
    files = [str(file) for file in _yaml_files(folder)]
    if not files:
        return f"; {str(folder)!r} has no YAML file"
    more = ", ..." if len(files) > MOST_NAMED else ""
    return f"; YAML files in {str(folder)!r}: {', '.join(files[:MOST_NAMED])}{more}"


def _yaml_files(folder: Path) -> list[Path]:
    """Return the YAML files of a folder by name; none if it may not be read."""
    try:
        return sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    except OSError:
        return []
