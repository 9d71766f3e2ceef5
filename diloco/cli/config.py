"""The commands about config files: init, config, settings, key. Importing this does not import
torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli import arguments as args


def init(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the run. The file is NAME.yaml, in this folder."
        ),
    ],
) -> None:
    """Write a config for a first run, with a comment at each value, and print the commands that can
    use it.
    """
    from diloco.config.new_config import write_config

    path = write_config(name, Path.cwd())
    typer.echo(
        f"wrote {path.name}: a model of 1M parameters on two islands. Change what you like, then\n"
        f"    diloco simulate {path.name}               trains it on this machine in some minutes\n"
        f"    diloco plan {path.name} --bandwidth 100mbit --rtt 50ms     what it costs on a link; "
        "starts nothing\n"
        "    diloco settings codec                 settings with this word in their name or meaning"
    )


def config(config: args.ConfigPath, overrides: args.Overrides = None) -> None:
    """Print the resolved config: every value, and the hash that all islands of a run must share."""
    from diloco.config.schema import dump_config, load_config

    resolved = load_config(config, overrides or [])
    typer.echo(f"# hash of the run's part: {resolved.run.hash}\n{dump_config(resolved)}", nl=False)


def settings(
    text: Annotated[
        str,
        typer.Argument(
            metavar="[TEXT]", help="Only settings with this text in their name or meaning."
        ),
    ] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all of them as a page in Markdown.")
    ] = False,
    json_schema: Annotated[
        bool,
        typer.Option(
            "--json-schema", help="Print the JSON Schema of a config, for completion in an editor."
        ),
    ] = False,
) -> None:
    """Explain the settings of a config: allowed values, default and meaning."""
    from diloco.config.reference import config_schema, find_settings, nearest_setting, settings_page

    if markdown or json_schema:
        if text or (markdown and json_schema):
            raise typer.BadParameter(
                "each prints everything in its own form; give only one of them, and no TEXT"
            )
        import json

        typer.echo(
            settings_page() if markdown else json.dumps(config_schema(), indent=2), nl=not markdown
        )
        return
    found = find_settings(text)
    for each in found:
        typer.echo(f"{each.key}  ({each.allowed}; default: {each.default})\n    {each.meaning}")
    if not found:
        near = nearest_setting(text)
        hint = f"; did you mean {near}?" if near else ""
        raise typer.BadParameter(
            f"no setting has {text!r} in its name or meaning{hint}", param_hint="TEXT"
        )


def key(config: args.ConfigPath, overrides: args.Overrides = None) -> None:
    """Print the public key of the island that CONFIG describes on this machine; create the key if
    there is none.

    Other islands can list it in island.allow. The secret half is in island.key in the island's
    folder and stays there.
    """
    from diloco.config.schema import load_config
    from outer.identity.island_key import KEY_FILE, load_island_key

    resolved = load_config(config, overrides or [])
    island = resolved.for_island(resolved.island.index)
    folder = island.folder(resolved.name)
    typer.echo(load_island_key(folder / KEY_FILE).public)
