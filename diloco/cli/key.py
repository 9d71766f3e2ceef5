"""The command `diloco key`. Importing this does not import torch."""

from pathlib import Path

import typer

from diloco.cli import arguments as args


def key(config: args.ConfigPath, overrides: args.Overrides = None) -> None:
    """Print the public key of the island that CONFIG describes on this machine; make the key if there is none.

    Others can list it in island.allow. The secret half is in island.key in the island's folder: it stays there.
    """
    from diloco.config.schema import load_config
    from outer.identity.island_key import KEY_FILE, load_island_key

    resolved = load_config(config, overrides or [])
    island = resolved.for_island(resolved.island.index)
    folder = Path(island.run_dir) / resolved.name / island.label
    typer.echo(load_island_key(folder / KEY_FILE).public)
