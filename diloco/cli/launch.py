"""`diloco launch`: starts all ranks of an island of one node. Importing this does not import torch."""

from typing import Annotated

import typer

from diloco.cli.arguments import ConfigPath, Overrides, Resume, with_resume


def launch(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Sets island.ranks (default: as in CONFIG).")] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to start the ranks again after one has died.")
    ] = 3,
    resume: Resume = None,
) -> None:
    """Run an island of one node (island.index): start its ranks, and start all again when one dies.

    SIGTERM and Ctrl-C let the island leave at once; SIGUSR1 and SIGUSR2 go to its ranks. It exits
    with the status of the rank that failed, 143 after SIGTERM, and 0 when the run is over. A rank without
    a GPU of its own, where island.device is cuda, ends it with 78, as anything that would fail again.
    """
    from diloco.config.schema import load_config
    from diloco.errors import FINAL_STATUS, ConfigError
    from diloco.runtime.devices import choose_device, list_gpus
    from diloco.runtime.processes import become_island

    values = with_resume(overrides, resume) + ([] if ranks is None else [f"island.ranks={ranks}"])
    resolved = load_config(config, values)
    island = resolved.for_island(resolved.island.index)
    num_ranks = island.ranks
    try:
        if island.device == "cuda":
            choose_device(island.device, 0, num_ranks, len(list_gpus()))
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(FINAL_STATUS) from None
    become_island(num_ranks, ["train", str(config), *values], max_restarts)
