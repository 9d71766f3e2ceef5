"""The commands for islands on different machines: bootstrap, relay, join, doctor, status, watch."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli import arguments as args


def bootstrap(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")
    ] = 0,
    rendezvous: Annotated[
        str,
        typer.Option(help="dht (for outer.transport=hivemind and tls) or tcp (for gloo and tls)."),
    ] = "dht",
    identity: Annotated[
        Path | None,
        typer.Option(help="With dht: key file that keeps the address the same after a restart."),
    ] = None,
    run_key_file: Annotated[
        Path | None,
        typer.Option(help="With tcp: file with the run key, for runs whose islands use one."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="With tcp: folder that keeps the owners of islands' names after a restart."
        ),
    ] = None,
) -> None:
    """Serve the address at which islands find each other, and print it. Trains nothing.

    Serves until SIGTERM or Ctrl-C, even after the shell or terminal that started it has ended.
    """
    from diloco.swarm.bootstrap import bootstrap as run

    run(host, port, rendezvous, identity, run_key_file, folder)


def relay(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")
    ] = 0,
    announce_host: Annotated[
        str | None,
        typer.Option(help="Address to print, if others reach this machine at a different one."),
    ] = None,
    run_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the run key: only islands that hold it may register."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Public key of an island that may register; repeatable (default: all)."),
    ] = None,
    mbit: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Most Mbit/s to forward for one island, both directions together."
        ),
    ] = None,
) -> None:
    """Forward connections to islands that cannot be reached directly, and print the address of the
    relay.

    It is for runs with outer.transport=tls and island.relays. The relay sees which islands connect
    with each other and how much they send, but not the content, because TLS runs between them.
    """
    from diloco.swarm.bootstrap import relay as run

    run(host, port, announce_host, run_key_file, allow or [], mbit)


def join(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Address printed by `diloco bootstrap`.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[island.key=value ...]", help="Settings of this island."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes of this island.")] = 1,
    run_name: Annotated[
        str | None, typer.Option("--run", help="Name of the run to join, if the swarm has several.")
    ] = None,
    resume: args.Resume = None,
) -> None:
    """Join a run: get its config from the swarm, download the state from other islands, then
    train.
    """
    from diloco.swarm.join import join as run

    run(address, args.with_resume(overrides, resume), ranks, run_name)


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADDRESS] [section.key=value ...]",
            help="Address printed by `diloco bootstrap`, and settings.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="The run's YAML file, to check it and compare it with the swarm's config."
        ),
    ] = None,
    run_name: Annotated[
        str | None, typer.Option("--run", help="Name of the run to check (default: all runs).")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Check the config's settings against members that lie, too."),
    ] = False,
) -> None:
    """Check this machine and, given an address, the links to every island of the swarm. Exits 1 if
    a check fails.

    Give the settings that the island on this machine will have (island.listen_host,
    island.listen_port, island.announce_host, island.run_key_file, ...): the doctor listens as that
    island would and asks other islands to call back. It changes nothing.
    """
    import logging

    from diloco.doctor.diagnose import doctor as run

    logging.getLogger("outer").setLevel(
        logging.CRITICAL
    )  # The checks report these problems themselves.
    raise typer.Exit(run(arguments or [], config, run_name, is_strict=strict))


SINCE = typer.Option(
    metavar="TIME",
    help="Tell what happened since then: 8h, 30min, 22:30 (UTC) or a date (default: the "
    "beginning).",
)


def status(
    target: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS|RUN_DIR",
            help="Address printed by `diloco bootstrap`, or a run's folder.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[island.key=value ...]", help="Key, proxy, ... to reach islands with."
        ),
    ] = None,
    run_name: Annotated[
        str | None, typer.Option("--run", help="Name of the run to show (default: all runs).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    since: Annotated[str | None, SINCE] = None,
) -> None:
    """Show the state of each island of a run, as reported by the islands or read from the records
    in a folder.

    Exits 1 if an island does not answer. It changes nothing. A training island answers within
    milliseconds.
    """
    import logging

    from diloco.status.command import status as run

    logging.getLogger("outer").setLevel(
        logging.CRITICAL
    )  # The table shows islands that cannot be reached.
    raise typer.Exit(run(target, overrides or [], run_name, as_json=as_json, since=since))


def watch(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR|ADDRESS",
            help="A run's folder, or the address printed by `diloco bootstrap`.",
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN_DIR | island.key=value ...]",
            help="The folder of a second run, to show both side by side; with an address, the key, "
            "proxy, ... to reach "
            "islands with.",
        ),
    ] = None,
    run_name: Annotated[
        str | None,
        typer.Option("--run", help="Name of the run to watch, if the swarm has several."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="With an address: folder that keeps the collected records (default: they are "
            "deleted)."
        ),
    ] = None,
    control: Annotated[
        Path | None,
        typer.Option(
            metavar="KEYFILE",
            help="Let the page act (save, stop, exclude, invite) with this operator's key; created "
            "if missing.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE[,rtt=TIME]",
            help="An island's link for the prediction, as in 100mbit,rtt=50ms (default: the link "
            "of simulate --link, "
            "island.link_mbit, or the rate of the last reduces).",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Requests from other machines need a token, which is in the "
            "URL."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8420,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the state once as JSON; serve nothing.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="Show the run in the terminal; serve nothing.")
    ] = False,
    since: Annotated[str | None, SINCE] = None,
) -> None:
    """Serve a dashboard of a run, live or replayed, from its folder or by queries to its
    islands.
    """
    import logging

    from diloco.watch.command import Watched
    from diloco.watch.command import watch as run

    logging.getLogger("outer").setLevel(
        logging.CRITICAL
    )  # The page shows islands that cannot be reached.
    how = "json" if as_json else "text" if text else "page"
    run(Watched(target, more or [], run_name, keep, control, link, since), how, host, port)
