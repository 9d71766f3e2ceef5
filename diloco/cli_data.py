"""The command that prepares data; cli.py registers it. No torch here."""

from typing import Annotated

import typer

from diloco.cli_arguments import ConfigPath, Overrides


def prepare(
    config: ConfigPath,
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, max=1024, help="That tokenise; the result is the same.")] = 1,
) -> None:
    """Tokenise the text of an island (island.index) into its cache; killed, it goes on where it was when run again.

    A run does the same when it starts and the text is not there, in one process.
    """
    from diloco.prepare import prepare as run

    run(config, overrides or [], processes)
