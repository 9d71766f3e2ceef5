"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, for example configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Values that win over the file's.")
]
