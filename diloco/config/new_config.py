"""The config of a first run, for `diloco init`."""

import re
from importlib.resources import files
from pathlib import Path

from diloco.errors import ConfigError
from outer.network.endpoints import RUN_NAME

TEMPLATE = "new_config.yaml"


def write_config(name: str, folder: Path) -> Path:
    """Write `folder`/NAME.yaml for a run called `name`, which may also be given with the ending.
    Raises ConfigError for an invalid name or an existing file.
    """
    name = name.removesuffix(".yaml")
    if not re.fullmatch(RUN_NAME, name):
        raise ConfigError(
            f"NAME: got {name!r}; allowed: at most 64 letters, digits, . _ and -, beginning with a "
            "letter or digit"
        )
    path = folder / f"{name}.yaml"
    text = files("diloco.config").joinpath(TEMPLATE).read_text().replace("NAME", name)
    try:
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already; choose another name, or move that file away"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; go to a folder where this user may write"
        ) from None
    return path
