"""The command `diloco`. Each command imports only what it needs, so that --help answers at once."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli import arguments as args
from diloco.cli.config import config, init, key, settings
from diloco.cli.exit import end, error_text, exit_status
from diloco.cli.experiment import experiment
from diloco.cli.launch import launch, launch_files
from diloco.cli.prepare import prepare
from diloco.cli.simulate import rehearse, simulate
from diloco.cli.swarm import bootstrap, doctor, join, relay, status, watch
from diloco.cli.weights import evaluate, export, generate
from diloco.watchdog.life_signs import life_signs
from diloco.watchdog.signals import watch_parent

QUIET = {
    "mesh": "planning the mesh",
    "plan": "planning the run",
    "report": "reading the run's records",
    "status": "finding the run",
    "simulate --virtual": "building the islands",
}
"""What commands do that print nothing before they have a result."""
app = typer.Typer(
    name="diloco",
    help="Train one language model over islands: FSDP inside each island, DiLoCo between them.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


for command in (init, simulate, rehearse, experiment):
    app.command()(command)


@app.command()
def train(
    config: args.ConfigPath, overrides: args.Overrides = None, resume: args.Resume = None
) -> None:
    """Run one rank of an island. Started by `diloco launch` on one node, or by torchrun on several
    nodes.
    """
    from diloco.config.schema import load_config

    resolved = load_config(config, args.with_resume(overrides, resume))
    from diloco.train import train as run

    run(resolved, resolved.island.index)


@app.command(hidden=True)
def islands(
    config: args.ConfigPath,
    overrides: args.Overrides = None,
    processors: Annotated[
        int | None, typer.Option(min=1, help="Most islands that compute at the same time.")
    ] = None,
) -> None:
    """Run all islands of a config as threads of this process. Started by `simulate --in-process`
    and `experiment`.
    """
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


for command in (config, settings):
    app.command()(command)


@app.command()
def mesh(
    config: args.ConfigPath,
    overrides: args.Overrides = None,
    island: Annotated[int, typer.Option(min=0, help="Index of the island to draw.")] = 0,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory per rank, for example 80GB; exits 1 if a step does not fit."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Kind of the island's GPUs, as h100: adds their memory and the data sheet's "
            "seconds per step."
        ),
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            help="With --gpu: links between its nodes of eight GPUs (default: infiniband-ndr)."
        ),
    ] = None,
    placements: Annotated[
        bool,
        typer.Option(
            "--placements", help="Also list which slices of every parameter a rank holds."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Also make a step of three ranks at full size on a device that computes nothing, "
            "without a GPU, and "
            "compare memory and traffic with the plan. Takes 10 to 40 processor seconds per rank "
            "for 8B parameters.",
        ),
    ] = False,
) -> None:
    """Draw an island's mesh without starting it: the ranks, their traffic, the pipeline and the
    memory.
    """
    from rich.console import Console

    from diloco.planning.mesh.picture import show_mesh
    from diloco.planning.mesh.request import MeshRequest

    request = MeshRequest(index=island, memory=memory, gpu=gpu, fabric=fabric)
    more = []
    if placements or dry_run:
        from diloco.planning.mesh.dry_run import show_dry_run
        from diloco.planning.mesh.placements import show_placements

        more = [show_placements] * placements + [show_dry_run] * dry_run
    raise typer.Exit(0 if show_mesh(config, overrides or [], request, Console(), more) else 1)


@app.command()
def plan(
    config: args.ConfigPath,
    overrides: args.Overrides = None,
    islands: args.NumIslands = None,
    bandwidth: Annotated[
        str,
        typer.Option(
            help="Bandwidth of each island's link, per direction, for example 100mbit or 2.5gbit."
        ),
    ] = "1gbit",
    rtt: Annotated[
        str, typer.Option(help="Round-trip time between islands, for example 50ms.")
    ] = "0ms",
    disk: Annotated[
        str,
        typer.Option(
            help="Bytes per second of an island's disk, all of its ranks together, for example 2GB."
        ),
    ] = "1GB",
    step_seconds: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time of an inner step: 0.2 or 200ms (default: computed from --flops).",
        ),
    ] = None,
    flops: args.Flops = None,
    gpu: args.GpuNames = None,
    spread: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="How much longer a step takes on the slowest island, as a fraction, for example "
            "0.1.",
        ),
    ] = None,
    codec_speed: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="fp32 bytes encoded per second, for example 2G (default: measured).",
        ),
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=0.999,
            help="Required share of time spent computing, for example 0.95; exits 1 if not "
            "reached.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT", help="Predict the time for this many tokens: 10B (default: the run's)."
        ),
    ] = None,
    gpus: args.Gpus = None,
    watts: args.Watts = None,
    hours: args.Hours = None,
) -> None:
    """Predict the cost of a run on given links, term by term, and recommend settings. Starts
    nothing.
    """
    from rich.console import Console

    from diloco.planning.plan import PlanRequest, show_plan

    request = PlanRequest(
        islands=islands,
        bandwidth=bandwidth,
        rtt=rtt,
        disk=disk,
        step_seconds=step_seconds,
        flops=flops,
        gpu=gpu,
        spread=spread,
        codec_speed=codec_speed,
        utilisation=utilisation,
        tokens=tokens,
        gpus=gpus,
        watts=watts,
        hours=hours,
    )
    raise typer.Exit(0 if show_plan(config, overrides or [], request, Console()) else 1)


@app.command()
def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...",
            help="Folder of a run, for example runs/quickstart. For a run over several clusters, "
            "give one folder each.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of the report (default: the first RUN_DIR)."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write only the page of `diloco watch` with its data, as one file."
        ),
    ] = None,
) -> None:
    """Write summary.json and report.html of a run from its metrics, and print the summary and the
    islands.
    """
    if page is not None:
        from diloco.errors import ConfigError
        from diloco.watch.saved_page import write_page

        if len(run_dirs) > 1 or out is not None:
            raise ConfigError(
                f"got --page with {len(run_dirs)} folders and --out {out}; give one folder and no "
                "--out"
            )
        write_page(run_dirs[0], page)
        typer.echo(f"page: {page}")
        return
    from rich.console import Console

    from diloco.formatting import align
    from diloco.records.run_folder import read_run
    from diloco.report.html import write_report
    from diloco.report.island_table import short_rows
    from diloco.report.summary import write_summary
    from diloco.report.summary_table import describe_unread, print_summary
    from inner.files import make_folder

    if out is not None:
        make_folder(out, "--out")
    run = read_run(*run_dirs)
    summary = write_summary(run, out)
    print_summary(summary, Console())
    typer.echo("\n".join(align(short_rows(run.islands))))
    if unread := describe_unread(summary):
        typer.echo(unread)
    typer.echo(f"report: {write_report(run, summary, out)}")


app.command("launch-files")(launch_files)
for command in (
    watch,
    bootstrap,
    relay,
    join,
    doctor,
    status,
    launch,
    key,
    prepare,
    export,
    evaluate,
    generate,
):
    app.command()(command)


@contextmanager
def telling_of(words: Sequence[str]) -> Iterator[None]:
    """Show that a command is alive which prints nothing before it has its result."""
    command = " ".join([*words[:1], *(["--virtual"] if "--virtual" in words else [])])
    what = QUIET.get(command)
    with nullcontext() if what is None or "--help" in words else life_signs(what):
        yield


def main() -> None:
    """Run the command line. After a mistake of the user, print one message and exit with 2, in a
    rank FINAL_STATUS.
    """
    watch_parent()
    try:
        with telling_of(sys.argv[1:]):
            app(standalone_mode=True)
    except SystemExit as error:
        end(error.code if isinstance(error.code, int) else 1)
    except (ValueError, RuntimeError, OSError) as error:
        text = error_text(error)
        if text is None:
            raise
        sys.stderr.write(f"error: {text}\n")
        end(exit_status(error))
