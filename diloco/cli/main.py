"""The command `diloco`. Each command imports only what it needs, so that --help answers at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli import arguments as args
from diloco.cli.exit import end, error_text, exit_status
from diloco.cli.experiment import experiment
from diloco.cli.key import key
from diloco.cli.launch import launch
from diloco.cli.prepare import prepare
from diloco.cli.simulate import simulate
from diloco.cli.weights import evaluate, export, generate

app = typer.Typer(
    name="diloco",
    help="Train one language model over islands: FSDP inside each island, DiLoCo between them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.command()(simulate)
app.command()(experiment)


@app.command()
def train(config: args.ConfigPath, overrides: args.Overrides = None, resume: args.Resume = None) -> None:
    """Run one rank of an island. `diloco launch` starts all ranks of a node, torchrun those of several nodes."""
    from diloco.config.schema import load_config

    resolved = load_config(config, args.with_resume(overrides, resume))
    from diloco.train import train as run

    run(resolved, resolved.island.index)


@app.command(hidden=True)
def islands(
    config: args.ConfigPath,
    overrides: args.Overrides = None,
    processors: Annotated[int | None, typer.Option(min=1, help="Most islands that compute at once.")] = None,
) -> None:
    """Run all islands of a config as threads of this process. Started by `simulate --in-process` and `experiment`."""
    from diloco.config.schema import load_config

    resolved = load_config(config, overrides or [])
    from diloco.simulate.threads import train_together as run

    run(resolved, num_processors=processors)


@app.command(hidden=True)
def baseline(
    config: args.ConfigPath,
    overrides: args.Overrides = None,
    islands: int = typer.Option(...),
    ranks: int = typer.Option(...),
) -> None:
    """Run one rank of the data-parallel baseline. Started by `simulate --baseline`."""
    from diloco.config.schema import load_config

    resolved = load_config(config, overrides or [])
    from diloco.train import baseline as run

    run(resolved, islands, ranks)


@app.command()
def bootstrap(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 0,
    rendezvous: Annotated[
        str, typer.Option(help="dht (for outer.transport=hivemind) or tcp (for gloo and tls).")
    ] = "dht",
    identity: Annotated[
        Path | None, typer.Option(help="With dht: key file that keeps the address the same over restarts.")
    ] = None,
    run_key_file: Annotated[
        Path | None, typer.Option(help="With tcp: file with the run key, for runs whose islands use one.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="With tcp: folder that keeps the owners of islands' names over restarts.")
    ] = None,
) -> None:
    """Serve the address where islands find each other, and print it. Trains nothing.

    Serves until SIGTERM or Ctrl-C, also after the shell or terminal that started it has ended.
    """
    from diloco.swarm.bootstrap import bootstrap as run

    run(host, port, rendezvous, identity, run_key_file, folder)


@app.command()
def relay(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free port.")] = 0,
    announce_host: Annotated[
        str | None, typer.Option(help="Address to print, if others reach this machine by another one.")
    ] = None,
    run_key_file: Annotated[
        Path | None, typer.Option(help="File with the run key: only islands that hold it may register.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Public key of an island that may register; repeat it (default: all).")
    ] = None,
    mbit: Annotated[
        float | None, typer.Option(min=0.1, help="Most Mbit/s to forward to and from one island together.")
    ] = None,
) -> None:
    """Forward connections to islands that nobody can reach (outer.transport=tls, island.relays), and print the address.

    It sees who connects to whom and how much, and nothing else: TLS runs between the islands.
    """
    from diloco.swarm.bootstrap import relay as run

    run(host, port, announce_host, run_key_file, allow or [], mbit)


@app.command()
def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Address printed by `diloco bootstrap`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[island.key=value ...]", help="Settings of this island.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes of this island.")] = 1,
    run_name: Annotated[
        str | None, typer.Option("--run", help="Name of the run to join, if the swarm has several.")
    ] = None,
    resume: args.Resume = None,
) -> None:
    """Join a run: get its config from the swarm, download the state from the other islands, train."""
    from diloco.swarm.join import join as run

    run(address, args.with_resume(overrides, resume), ranks, run_name)


@app.command()
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADDRESS] [section.key=value ...]", help="Address printed by `diloco bootstrap`, and settings."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The run's YAML file, to check it and compare it with the swarm's config.")
    ] = None,
    run_name: Annotated[str | None, typer.Option("--run", help="Name of the run to check (default: all runs).")] = None,
) -> None:
    """Check this machine and, given an address, the links to every island there. Exits 1 if a check fails.

    Pass the settings that the island on this machine will have (island.listen_host,
    island.listen_port, island.announce_host, island.run_key_file, ...): the doctor listens as
    that island would and asks the others to call back. It changes nothing.
    """
    import logging

    from diloco.doctor.diagnose import doctor as run

    logging.getLogger("outer").setLevel(logging.CRITICAL)  # The checks report these problems themselves.
    raise typer.Exit(run(arguments or [], config, run_name))


@app.command("config")
def show_config(config: args.ConfigPath, overrides: args.Overrides = None) -> None:
    """Print the resolved config: every value, and the hash that all islands of a run must share."""
    from diloco.config.schema import dump_config, load_config

    resolved = load_config(config, overrides or [])
    typer.echo(f"# hash of the run's part: {resolved.run.hash}\n{dump_config(resolved)}", nl=False)


@app.command()
def mesh(
    config: args.ConfigPath,
    overrides: args.Overrides = None,
    island: Annotated[int, typer.Option(min=0, help="Index of the island to draw.")] = 0,
    memory: Annotated[
        str | None, typer.Option(help="Memory per rank, for example 80GB; exits 1 if a step does not fit.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Also make a step of three ranks at full size on a device that computes nothing, without a GPU, and "
            "compare memory and traffic with the plan. Takes 10 to 40 processor seconds a rank for 8B parameters.",
        ),
    ] = False,
) -> None:
    """Draw an island's mesh without starting it: the ranks, their traffic, the pipeline and the memory."""
    from rich.console import Console

    from diloco.planning.mesh_picture import show_mesh

    rehearse = None
    if dry_run:
        from diloco.planning.dry_run import show_dry_run as rehearse
    raise typer.Exit(0 if show_mesh(config, overrides or [], island, memory, Console(), rehearse) else 1)


@app.command()
def plan(
    config: args.ConfigPath,
    overrides: args.Overrides = None,
    islands: args.NumIslands = None,
    bandwidth: Annotated[
        str, typer.Option(help="Bandwidth of each island's link, per direction, for example 100mbit or 2.5gbit.")
    ] = "1gbit",
    rtt: Annotated[str, typer.Option(help="Round-trip time between islands, for example 50ms.")] = "0ms",
    step_seconds: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time of an inner step: 0.2 or 200ms (default: computed from --flops)."),
    ] = None,
    flops: Annotated[
        str | None, typer.Option(metavar="RATE", help="Peak FLOP/s of a rank, for example 400T (default: measured).")
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(min=0, help="Extra step time of the slowest island, as a fraction of the fastest one's: 0.1."),
    ] = None,
    codec_speed: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="fp32 bytes encoded per second, for example 2G (default: measured)."),
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=0.999,
            help="Required share of time spent computing, for example 0.95; exits 1 if not reached.",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Tokens to estimate a duration for: 10B (default: the run's).")
    ] = None,
) -> None:
    """Predict the cost of a run on given links, term by term, and recommend settings. Starts nothing."""
    from rich.console import Console

    from diloco.planning.plan import PlanRequest, show_plan

    request = PlanRequest(
        islands=islands,
        bandwidth=bandwidth,
        rtt=rtt,
        step_seconds=step_seconds,
        flops=flops,
        spread=spread,
        codec_speed=codec_speed,
        utilisation=utilisation,
        tokens=tokens,
    )
    raise typer.Exit(0 if show_plan(config, overrides or [], request, Console()) else 1)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, for example runs/quickstart.")],
) -> None:
    """Write summary.json and report.html of a run from its metrics, and print the summary."""
    from rich.console import Console

    from diloco.report.html import write_report
    from diloco.report.summary import write_summary
    from diloco.report.summary_table import print_summary

    summary = write_summary(run_dir)
    print_summary(summary, Console())
    typer.echo(f"report: {write_report(run_dir)}")


for command in (launch, key, prepare, export, evaluate, generate):
    app.command()(command)


def main() -> None:
    """Run the command line. A mistake of the user gives one message and exit status 2, in a rank FINAL_STATUS."""
    try:
        app(standalone_mode=True)
    except SystemExit as error:
        end(error.code if isinstance(error.code, int) else 1)
    except (ValueError, RuntimeError, OSError) as error:
        text = error_text(error)
        if text is None:
            raise
        sys.stderr.write(f"error: {text}\n")
        end(exit_status(error))
