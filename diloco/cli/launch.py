"""`diloco launch` starts the ranks of an island, `diloco launch-files` writes files for clusters.
Imports no torch.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from diloco.cli.arguments import ConfigPath, Overrides, Resume, with_resume


def launch(
    config: ConfigPath,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Sets island.ranks (default: as in CONFIG).")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to restart the ranks after one has died.")
    ] = 3,
    resume: Resume = None,
) -> None:
    """Run an island of one node (island.index): start its ranks, and restart all of them when one
    dies.

    On SIGTERM and Ctrl-C the island leaves at once; SIGUSR1 and SIGUSR2 are passed to its ranks.
    The command exits with the status of the rank that failed, 143 after SIGTERM, and 0 when the run
    is over. It exits with 78 if a restart cannot help, for example if island.device is cuda and a
    rank has no GPU.
    """
    from diloco.config.check import check_entry, check_index, check_network
    from diloco.config.schema import load_config
    from diloco.errors import FINAL_STATUS, ConfigError
    from diloco.runtime.devices.choice import check_device
    from diloco.runtime.processes import become_island
    from outer.errors import InputError

    values = with_resume(overrides, resume) + ([] if ranks is None else [f"island.ranks={ranks}"])
    resolved = load_config(config, values)
    island = resolved.for_island(resolved.island.index)
    try:
        check_network(resolved.run, island)
        check_device(island)
        check_index(resolved, resolved.island.index)
        check_entry(resolved.run, island)
    except (ConfigError, InputError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(FINAL_STATUS) from None
    become_island(island.ranks, ["train", str(config), *values], max_restarts)


def launch_files(
    target: Annotated[
        Literal["slurm", "kubernetes", "skypilot"], typer.Argument(help="What starts the islands.")
    ],
    config: ConfigPath,
    address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address printed by `diloco bootstrap`.")
    ],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the files.")] = Path(
        "launch"
    ),
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Number of GPUs of a node.")] = 8,
    image: Annotated[
        str | None,
        typer.Option(
            help="Container image in which `python -m diloco` runs, for kubernetes and skypilot."
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Kind of GPU, as SkyPilot names it.")] = "H100",
) -> None:
    """Write the files that start each island of CONFIG on a cluster. Starts nothing."""
    from diloco.launch_files.write import ClusterOptions, write_launch_files

    written = write_launch_files(
        target, config, overrides or [], out, ClusterOptions(address, gpus_per_node, image, gpu)
    )
    start = {
        "slurm": "bash {} --time 24:00:00",
        "kubernetes": "kubectl apply -f {}",
        "skypilot": "sky jobs launch {}",
    }
    before = f"cd {out} && " if target == "skypilot" else ""
    for path in written:
        typer.echo(before + start[target].format(path.name if before else path))
