"""The command `diloco`. Imports only what each command needs: --help answers at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli_arguments import ConfigPath, Overrides, Resume, with_resume
from diloco.cli_data import prepare
from diloco.cli_end import end, told
from diloco.cli_weights import evaluate, export, generate

app = typer.Typer(
    name="diloco",
    help="Train one language model over islands: FSDP inside each, DiLoCo between them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    islands: Annotated[int | None, typer.Option(min=1, help="Number of islands; default: as many as listed.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes of each island; default: the file's.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Also train data-parallel on the same tokens.")] = False,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="Break something; see above. Repeatable. Example: --fault kill:1@round=3."),
    ] = None,
    storm: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="Random faults: RATE an island and minute on average, from the first commit on. Half of the islands "
            "at least are left up, so they may have to wait. Example: --storm 2.",
        ),
    ] = None,
    storm_seed: Annotated[int, typer.Option(help="The same seed draws the same faults in the same order.")] = 0,
    storm_count: Annotated[
        int | None, typer.Option(min=1, help="The storm ends after so many faults; default: with the run.")
    ] = None,
    netns: Annotated[
        bool,
        typer.Option("--netns", help="Each island in a network namespace of its own, as a cut has it; needs root."),
    ] = False,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ISLAND:]RATE[,rtt=TIME]",
            help="Shape the islands' access links, up and down each, with TIME from one to another and back; needs "
            "root. Repeatable: 1gbit for all, 0:50mbit for island 0. With rtt on a kernel without netem all islands "
            "together get about 2 Gbit/s. Example: --link 100mbit,rtt=50ms.",
        ),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="All islands as threads of one process, which take turns on its processors: many of them on a small "
            "machine, with the very results of real processes. Example: --in-process --islands 32 --ranks 1.",
        ),
    ] = False,
) -> None:
    """Run all islands of a config on this machine, as real processes, and write a report.

    What --fault takes is KIND:WHO@WHEN,OPTION=VALUE. WHO is an island's index. WHEN is round=N (it has begun round N;
    the first is 0), step=N (it has made N inner steps) or second=S (seconds after the run's first commit).

    \b
    kill:1@round=3,back=5          SIGKILL; started again after 5 s if back is given
    kill:bootstrap@round=2,back=5  the bootstrap process
    leave:1@round=6                SIGTERM; back as above
    freeze:1@round=3,seconds=20    SIGSTOP, then SIGCONT
    kill:1@round=3,phase=decide    kill or freeze at this very point of the round
    slow:2x3                       each inner step takes 3 times as long
    corrupt:1@round=4              one bit of a payload that it sends flips
    nan:1@round=4                  a payload that it sends is all NaN
    poison:1@round=5,rounds=1      pseudo-gradient x -10; for good without rounds
    join:@round=4                  one more island, by diloco join
    cut:0-1@step=40,seconds=15     their link carries nothing; needs root
    cut:0@step=40                  one from all; cut:0+1-2+3@step=40 groups
    """
    if storm is not None and not 0 < storm < float("inf"):
        raise typer.BadParameter(f"got {storm}; allowed: a number above 0, for example 2", param_hint="--storm")
    if storm is None and (storm_seed or storm_count):
        raise typer.BadParameter("there is no storm without --storm RATE", param_hint="--storm-seed, --storm-count")
    from diloco.simulate import Trouble
    from diloco.simulate import simulate as run

    trouble = Trouble(tuple(fault or ()), storm, storm_seed, storm_count, netns, tuple(link or ()))
    options = {"with_baseline": baseline, "in_process": in_process}
    raise typer.Exit(run(config, overrides or [], islands, ranks, trouble=trouble, **options))


@app.command()
def train(config: ConfigPath, overrides: Overrides = None, resume: Resume = None) -> None:
    """Run this rank of one island: torchrun --nproc-per-node R -m diloco train CONFIG island.index=K."""
    from diloco.config import load_config

    resolved = load_config(config, with_resume(overrides, resume))
    from diloco.train import train as run

    run(resolved, resolved.island.index)


@app.command(hidden=True)
def islands(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run all islands of a config as threads of this process: what `simulate --in-process` starts."""
    from diloco.config import load_config

    resolved = load_config(config, overrides or [])
    from diloco.turns import train_together as run

    run(resolved)


@app.command(hidden=True)
def baseline(
    config: ConfigPath, overrides: Overrides = None, islands: int = typer.Option(...), ranks: int = typer.Option(...)
) -> None:
    """Run this rank of the data-parallel baseline that `simulate --baseline` compares with."""
    from diloco.config import load_config

    resolved = load_config(config, overrides or [])
    from diloco.train import baseline as run

    run(resolved, islands, ranks)


@app.command()
def bootstrap(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    rendezvous: Annotated[str, typer.Option(help="dht (for outer.transport hivemind) or tcp (for gloo).")] = "dht",
    identity: Annotated[Path | None, typer.Option(help="dht: key file that keeps the address over restarts.")] = None,
    run_key_file: Annotated[
        Path | None, typer.Option(help="tcp: the run's key, for runs whose islands have island.run_key_file.")
    ] = None,
) -> None:
    """Be the address where islands find each other. Trains nothing; prints the address to give to them."""
    from diloco.bootstrap import bootstrap as run

    run(host, port, rendezvous, identity, run_key_file)


@app.command()
def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="As printed by `diloco bootstrap`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[island.key=value ...]", help="This island's own values.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes of this island.")] = 1,
    run_name: Annotated[str | None, typer.Option("--run", help="The run's name, if the swarm has several.")] = None,
    resume: Resume = None,
) -> None:
    """Join a run: get its config from the swarm, take the islands' state, train."""
    from diloco.join import join as run

    raise typer.Exit(run(address, with_resume(overrides, resume), ranks, run_name))


@app.command()
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ADDRESS] [section.key=value ...]", help="As printed by `diloco bootstrap`; values."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The run's YAML file, to be checked and compared, too.")] = None,
    run_name: Annotated[str | None, typer.Option("--run", help="Which of the swarm's runs; default: all.")] = None,
) -> None:
    """Check this machine and, with an address, the links to every island there; status 1 if a check failed.

    Give it the island.key=value that the island here will have (listen_host, listen_port, announce_host,
    run_key_file, ...): it listens as that island would, and lets the others call back. It changes nothing.
    """
    import logging

    from diloco.doctor import doctor as run

    logging.getLogger("outer").setLevel(logging.CRITICAL)  # the checks say what there is to say
    raise typer.Exit(run(arguments or [], config, run_name))


@app.command("config")
def show_config(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the resolved config: every value, and the hash that islands of a run must share."""
    from diloco.config import dump_config, load_config

    resolved = load_config(config, overrides or [])
    typer.echo(f"# hash of the run's part: {resolved.run.hash}\n{dump_config(resolved)}", nl=False)


@app.command()
def mesh(
    config: ConfigPath,
    overrides: Overrides = None,
    island: Annotated[int, typer.Option(min=0, help="Which of the config's islands.")] = 0,
    memory: Annotated[
        str | None, typer.Option(help="Of one rank, for example 80GB: says whether a step fits; status 1 if not.")
    ] = None,
) -> None:
    """Draw an island's mesh without starting it: who is where, what they send, the pipeline, and the memory."""
    from rich.console import Console

    from diloco.mesh_picture import show_mesh

    raise typer.Exit(0 if show_mesh(config, overrides or [], island, memory, Console()) else 1)


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    islands: Annotated[int | None, typer.Option(min=1, help="Number of islands; default: the config's.")] = None,
    bandwidth: Annotated[str, typer.Option(help="Of an island's link, each way: 100mbit, 2.5gbit.")] = "1gbit",
    rtt: Annotated[str, typer.Option(help="Round-trip time between islands: 50ms.")] = "0ms",
    step_seconds: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of an inner step: 0.2 or 200ms; default: from --flops.")
    ] = None,
    flops: Annotated[
        str | None, typer.Option(metavar="RATE", help="Peak of a rank, a second: 400T; default: measured here.")
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(min=0, help="How much longer the slowest island's steps are, as a share of the fastest's: 0.1."),
    ] = None,
    codec_speed: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Of fp32 coded in a second: 2G; default: measured here.")
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=0.999, help="Wanted share of the time that computes, 0.95; status 1 if not reached."
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Say how long so many take: 10B; default: the run's.")
    ] = None,
) -> None:
    """Predict what a run costs on given links, term by term, and what to set; starts nothing."""
    from rich.console import Console

    from diloco.plan import Question, show_plan

    question = Question(
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
    raise typer.Exit(0 if show_plan(config, overrides or [], question, Console()) else 1)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder, for example runs/quickstart.")],
) -> None:
    """Write summary.json and report.html of a run from its metrics, and print the summary."""
    from rich.console import Console

    from diloco.report import write_report
    from diloco.summary import write_summary
    from diloco.summary_table import print_summary

    summary = write_summary(run_dir)
    print_summary(summary, Console())
    typer.echo(f"report: {write_report(run_dir)}")


for command in (prepare, export, evaluate, generate):
    app.command()(command)


def main() -> None:
    """Run the command line; a user's mistake is one clear message and exit status 2."""
    try:
        app(standalone_mode=True)
    except SystemExit as error:
        end(error.code if isinstance(error.code, int) else 1)
    except (ValueError, RuntimeError, OSError) as error:
        text = told(error)
        if text is None:
            raise
        sys.stderr.write(f"error: {text}\n")
        end(2 if isinstance(error, ValueError) else 1)
