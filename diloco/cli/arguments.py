"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, for example configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Values that win over the file's.")
]
Resume = Annotated[
    Literal["auto", "never"] | None,
    typer.Option(
        help="auto: go on from the newest whole checkpoint, if there is one; never: from the beginning. Sets "
        "island.checkpoint.resume, whatever else does; default: auto."
    ),
]


def with_resume(overrides: list[str] | None, resume: str | None) -> list[str]:
    """The overrides, after which the option has the last word."""
    return [*(overrides or []), *([] if resume is None else [f"island.checkpoint.resume={resume}"])]
