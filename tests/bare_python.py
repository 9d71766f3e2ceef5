"""A Python as on a machine that lacks some packages."""

import sys
import venv
from collections.abc import Collection
from pathlib import Path


def make_python_without(absent: Collection[str], folder: Path) -> Path:
    """The Python of a new virtual environment in `folder`, with links to all packages of this one
    but `absent`.

    Names are in lower case. Of those packages neither files nor metadata are there.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for place in (
        Path(each) for each in sys.path if Path(each).name in ("site-packages", "dist-packages")
    ):
        for entry in place.iterdir():
            # What lies beside packages would lead back to where they are.
            is_package = (
                entry.suffix not in (".pth", ".egg-link") and not (site / entry.name).exists()
            )
            if is_package and entry.name.replace("-", ".").split(".")[0].lower() not in absent:
                (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
