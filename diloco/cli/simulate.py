"""`diloco simulate`: all islands of a run on this machine. Importing this does not import torch."""

from collections.abc import Mapping
from typing import Annotated

import typer

from diloco.cli import arguments as args


def simulate(
    config: args.ConfigPath,
    overrides: args.Overrides = None,
    islands: args.NumIslands = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes per island (default: as in CONFIG).")
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Also train a data-parallel baseline on the same tokens."),
    ] = False,
    fault: args.Faults = None,
    storm: args.Storm = None,
    storm_seed: args.StormSeed = 0,
    storm_count: args.StormCount = None,
    netns: args.Netns = False,
    nodes: args.Nodes = 1,
    nat: args.Nat = None,
    proxy: args.Proxy = None,
    link: args.LinkOptions = None,
    in_process: args.InProcess = False,
    resume: args.ResumeRun = False,
    virtual: args.Virtual = False,
    step_seconds: args.StepSeconds = None,
    spread: args.Spread = None,
    host_seconds: args.HostSeconds = None,
) -> None:
    """Run all islands of a config on this machine, as real processes, and write a report.

    A fault has the form KIND:WHO@WHEN,OPTION=VALUE. WHO is an island's index. WHEN is round=N (the
    island has begun round N; the first is 0), step=N (it has made N inner steps) or second=S
    (seconds after the run's first commit).

    \b
    kill:1@round=3,back=5          SIGKILL island 1 (or 0+1, bootstrap, relay0); with back, restart
                                   it after 5 s
    leave:1@round=6                SIGTERM; back as above. freeze:1@round=3,seconds=20 is SIGSTOP,
                                   then SIGCONT
    kill:1@round=3,phase=decide    kill or freeze at this point of the round
    kill:1@round=3,process=rank1   kill or freeze one process only: rank0, ... or daemon (libp2p's),
                                   agent (torchrun)
    kill:1@round=3,node=1          with --nodes: kill or freeze a node, or cut it off inside its
                                   island
    slow:2x3                       make each inner step take 3 times as long
    corrupt:1@round=4              flip one bit of a payload that the island sends; nan:1@round=4
                                   sends NaN in one
    poison:1@round=5,rounds=1      multiply the pseudo-gradient by -10; without rounds, until the
                                   end of the run
    join:@round=4                  add one island, by diloco join
    forget:1@round=4               with --nat: its NAT loses all connections, as after a restart of
                                   the NAT
    cut:0-1@step=40,seconds=15     cut the link between two islands; cut:0@step=40 cuts one off,
                                   cut:0+1-2+3@... groups
    """
    check_storm(storm, storm_seed, storm_count)
    given = {
        "--ranks": ranks,
        "--baseline": baseline,
        "--netns": netns,
        "--nat": nat,
        "--proxy": proxy,
    }
    modelled = {"--step-seconds": step_seconds, "--spread": spread, "--host-seconds": host_seconds}
    given |= {"--nodes": nodes > 1, "--in-process": in_process, "--resume": resume}
    check_modelled(given, modelled, virtual=virtual)
    from diloco.faults.disturbances import Disturbances

    nets = netns, tuple(link or ()), sort_islands(nat), sort_islands(proxy), nodes
    disturbances = Disturbances(tuple(fault or ()), storm, storm_seed, storm_count, *nets)
    if virtual:
        from diloco.virtual.simulate import VirtualRequest, simulate_virtually

        request = VirtualRequest(islands, step_seconds, spread or 0.0, host_seconds, disturbances)
        raise typer.Exit(simulate_virtually(config, overrides or [], request))
    from diloco.simulate.launch import simulate as run

    how = {
        "disturbances": disturbances,
        "with_baseline": baseline,
        "in_process": in_process,
        "resume": resume,
    }
    raise typer.Exit(run(config, overrides or [], islands, ranks, **how))


def rehearse(config: args.ConfigPath, overrides: args.Overrides = None) -> None:
    """Run CONFIG in the small on this machine, and make one fault after another: a rank and an
    island killed, an island frozen, stopped and cut off, a payload damaged, the bootstrap process
    and a relay killed, all islands killed at once, an island that joins. Print what each did to
    the run.

    Islands and outer settings are those of CONFIG; the model and its text are tiny. It takes a few
    minutes, and exits with 1 if the run did not recover from a fault. Cuts need root on Linux, and
    are left out otherwise.
    """
    from diloco.rehearsal.run import rehearse as run

    raise typer.Exit(run(config, overrides or []))


def sort_islands(given: list[int] | None) -> tuple[int, ...]:
    """Return the islands of a repeatable option, each only once."""
    return tuple(sorted(set(given or ())))


def check_storm(rate: float | None, seed: int, count: int | None) -> None:
    """Raise BadParameter if the options of the storm do not make sense."""
    if rate is not None and not 0 < rate < float("inf"):
        raise typer.BadParameter(
            f"got {rate}; allowed: a number above 0, for example 2", param_hint="--storm"
        )
    if rate is None and (seed or count):
        raise typer.BadParameter(
            "there is no storm without --storm RATE", param_hint="--storm-seed, --storm-count"
        )


def check_modelled(
    of_processes: Mapping[str, object], of_models: Mapping[str, object], *, virtual: bool
) -> None:
    """Raise BadParameter if options do not fit --virtual, or need it.

    `of_processes`: options for real processes. `of_models`: options for modelled islands. A
    baseline with --resume is refused, too.
    """
    if of_processes["--resume"] and of_processes["--baseline"]:
        names = "--resume, --baseline"
        raise typer.BadParameter(
            "a baseline always starts from the beginning; leave out one of the two",
            param_hint=names,
        )
    if virtual and (given := [name for name, value in of_processes.items() if value]):
        raise typer.BadParameter(
            "--virtual starts no processes; leave it out", param_hint=", ".join(given)
        )
    if not virtual and (given := [name for name, value in of_models.items() if value is not None]):
        raise typer.BadParameter(
            "only --virtual models inner steps; add --virtual", param_hint=", ".join(given)
        )
