"""`diloco simulate`: run all islands on this machine as real processes, then print and write the
results.
"""

import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.console import Console

from diloco.config.init_weights import pin_weights_hash
from diloco.config.own_code import load_own_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.faults.disturbances import NO_DISTURBANCES, Disturbances
from diloco.faults.spec import BOOTSTRAP, parse_fault
from diloco.faults.storm import storm
from diloco.network_emulation.links import count_bytes, open_links, parse_links, relay_warning
from diloco.records.best_effort import best_effort
from diloco.records.run_folder import (
    BASELINE,
    FACTS,
    RunFacts,
    island_folders,
    read_run,
    write_facts,
)
from diloco.report.html import write_report
from diloco.report.summary import write_summary
from diloco.report.summary_table import print_summary
from diloco.runtime.devices.gpus import find_obstacle, list_cards, list_gpus
from diloco.runtime.devices.shares import (
    GpuShares,
    check_shares,
    describe_shares,
    share_first_gpu,
    share_gpus,
)
from diloco.runtime.processes import Child, island_command, stop
from diloco.simulate.checks import check_disturbances
from diloco.simulate.dashboard import Dashboard, print_failure
from diloco.simulate.fleet import (
    Fleet,
    assign_namespace,
    start_bootstrap,
    start_child,
    start_island,
    start_joiner,
    start_proxy,
    start_relays,
)
from diloco.simulate.in_process import configure_in_process, run_in_process
from diloco.simulate.injector import FaultInjector
from diloco.simulate.run_dir import prepare_run

POLL_SECONDS = 0.05
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C has ended."""


def simulate(
    path: Path,
    overrides: list[str],
    islands: int | None,
    ranks: int | None,
    *,
    with_baseline: bool,
    disturbances: Disturbances = NO_DISTURBANCES,
    in_process: bool = False,
    resume: bool = False,
) -> int:
    """Run the simulation, or with `resume` continue a stopped one, and print its results.

    Return exit status 0 if an island finished the run, 1 if none did, 130 if interrupted.
    """
    config = resize(pin_weights_hash(load_own_config(path, overrides)), islands, ranks)
    console = Console()
    status, run_dir = simulate_config(
        config,
        console,
        with_baseline=with_baseline,
        disturbances=disturbances,
        in_process=in_process,
        resume=resume,
    )
    if status != INTERRUPTED:
        print_results(run_dir, console)
    return status


def simulate_config(
    config: Config,
    console: Console,
    *,
    with_baseline: bool = False,
    disturbances: Disturbances = NO_DISTURBANCES,
    in_process: bool = False,
    resume: bool = False,
    injector: type[FaultInjector] = FaultInjector,
) -> tuple[int, Path]:
    """Run all islands of the config with an injector of this kind.

    Return the exit status as `simulate` does, and the run's folder.
    """
    if in_process:
        config = configure_in_process(config, has_disturbances=disturbances != NO_DISTURBANCES)
    else:
        check_transport(config)
    links = parse_links(disturbances.links, len(config.islands))
    check_disturbances(disturbances, config)
    gpus, num_gpus = share_machine(config, console, in_process=in_process)
    ranks_of_baseline = count_baseline_ranks(config, gpus, num_gpus)
    if with_baseline:
        check_baseline(config, ranks_of_baseline)
    facts, run_dir = prepare_run(config, " ".join(disturbances.links), resume=resume)
    config = config.model_copy(update={"name": run_dir.name})
    console.print(
        f"{facts.num_islands} islands, {facts.num_params:,} parameters, {config.total_steps} inner "
        f"steps: {run_dir}"
    )
    started: list[Child] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        with open_links(links) if disturbances.needs_net else nullcontext() as net:
            fleet = Fleet(run_dir, started, net=net, links=links, gpus=gpus, nat=disturbances.nat)
            fleet.num_nodes = disturbances.nodes
            fleet.proxied = disturbances.proxy
            fleet.injects_faults = disturbances.has_faults
            if net is not None and (warning := relay_warning(net, links, len(config.islands))):
                console.print(warning)
            try:
                finished = (
                    run_in_process(config, run_dir, started, console)
                    if in_process
                    else run_islands(config, run_dir, disturbances, fleet, console, injector)
                )
            finally:
                stop(started)
            record_links(fleet, facts)
        if with_baseline and finished:
            finished = run_baseline(config, run_dir, ranks_of_baseline, started, console)
    except KeyboardInterrupt:
        console.print(f"stopping; for the results so far: diloco report {run_dir}", soft_wrap=True)
        return INTERRUPTED, run_dir
    finally:
        stop(started)
    return (0 if finished else 1), run_dir


def print_results(run_dir: Path, console: Console) -> None:
    """Print the run's summary and write its report. A full disk does not change the exit status."""
    if not island_folders(run_dir):
        console.print(f"no island has started training; the logs are in {run_dir}", soft_wrap=True)
        return
    try:
        run = read_run(run_dir)
        summary = write_summary(run)
        print_summary(summary, console)
        console.print(f"report: {write_report(run, summary)}", soft_wrap=True)
    except OSError as error:
        console.print(
            f"no report: {error}; make room, then: diloco report {run_dir}", soft_wrap=True
        )


def share_machine(config: Config, console: Console, *, in_process: bool) -> tuple[GpuShares, int]:
    """Return the GPUs of each island and the number of the machine's GPUs. Print a note if they are
    shared or too few.

    Raises ConfigError if they do not suffice, or if an island cannot use its GPU.
    """
    islands = [config.for_island(index) for index in range(len(config.islands))]
    gpus = list_gpus()
    shares = share_first_gpu(islands, gpus) if in_process else share_gpus(islands, gpus)
    check_shares(islands, shares, dict(zip(gpus, list_cards(), strict=False)))
    for line in (
        ()
        if in_process
        else describe_shares(islands, shares, len(gpus), "" if gpus else find_obstacle())
    ):
        console.print(line, soft_wrap=True)
    return shares, len(gpus)


def resize(config: Config, islands: int | None, ranks: int | None) -> Config:
    """Return the config with the requested number of islands and ranks. The first round waits for
    all islands.

    Without a request the islands are as many as `islands` lists, or outer.start_islands if that is
    more.
    """
    count = islands or max(len(config.islands), config.outer.start_islands)
    listed = (
        [
            config.islands[i] if i < len(config.islands) else dict(config.islands[-1])
            for i in range(count)
        ]
        if config.islands
        else [{} for _ in range(count)]
    )
    if ranks is not None:
        listed = [{**island, "ranks": ranks} for island in listed]
    outer = config.outer.model_copy(update={"start_islands": count})
    return config.model_copy(update={"islands": tuple(listed), "outer": outer})


def check_transport(config: Config) -> None:
    """Raise ConfigError if the transport cannot connect islands in separate processes."""
    if not config.outer.network.leaves_process and len(config.islands) > 1:
        raise ConfigError(
            f"outer.transport is {config.outer.transport!r}, which connects islands of one process "
            "only; simulate "
            "starts real processes: use outer.transport=gloo, tls or hivemind, or --in-process"
        )


def run_islands(
    config: Config,
    run_dir: Path,
    disturbances: Disturbances,
    fleet: Fleet,
    console: Console,
    injector: type[FaultInjector] = FaultInjector,
) -> bool:
    """Start all processes, inject the faults and show the run until it is over. Return whether an
    island finished.
    """
    faults = [parse_fault(spec) for spec in disturbances.faults]
    address = None
    if config.outer.network.leaves_process:
        assign_namespace(fleet, BOOTSTRAP)
        address = start_bootstrap(config, run_dir, fleet)
    if fleet.hidden:
        start_relays(config, fleet)
    for index in range(len(config.islands)):
        assign_namespace(fleet, index, fleet.num_nodes)
        if index in fleet.proxied:
            start_proxy(fleet, index)
        fleet.islands[index] = start_island(config, index, address, faults, fleet)
    if address is not None:
        fleet.join = lambda index: start_joiner(config, index, address, faults, fleet)
    storm_faults = None
    if disturbances.storm is not None:
        endless = storm(disturbances.storm_seed, disturbances.storm, len(config.islands))
        storm_faults = islice(endless, disturbances.storm_count)
    supervise(
        fleet,
        injector(fleet, faults, storm_faults),
        Dashboard(run_dir, [], config.total_steps, console),
        console,
    )
    return any(island.exit_code == 0 for island in fleet.islands.values())


def run_baseline(
    config: Config, run_dir: Path, ranks: int, started: list[Child], console: Console
) -> bool:
    """Train data-parallel on `ranks` ranks. Return whether the training finished."""
    console.print("baseline: synchronous data-parallel training on the same tokens")
    arguments = [
        "baseline",
        str(run_dir / "config.yaml"),
        f"name={run_dir.name}",
        f"island.run_dir={run_dir.parent}",
    ]
    arguments += ["--islands", str(len(config.islands)), "--ranks", str(ranks)]
    fleet = Fleet(run_dir, started)
    child = start_child(
        fleet, 0, BASELINE, island_command(ranks, arguments), run_dir / BASELINE / "log.txt"
    )
    fleet.islands[0] = child
    supervise(
        fleet, FaultInjector(fleet), Dashboard(run_dir, [], config.total_steps, console), console
    )
    return child.exit_code == 0


def record_links(fleet: Fleet, facts: RunFacts) -> None:
    """Add the bytes that the islands' links have carried to run.json, if the run has an emulated
    network.
    """
    if fleet.net is None:
        return
    both = {
        fleet.islands[target].name: count_bytes(fleet.net, fleet.namespaces[target])
        for target in fleet.islands
    }
    sent, received = ({name: ways[i] for name, ways in both.items()} for i in range(2))
    with best_effort(f"{fleet.run_dir / FACTS} lacks the bytes of the links"):
        write_facts(
            fleet.run_dir, replace(facts, wire_bytes_sent=sent, wire_bytes_received=received)
        )


def count_baseline_ranks(config: Config, shares: GpuShares, num_gpus: int) -> int:
    """Return the baseline's ranks: those of all islands, or of the first island if there are too
    few GPUs or processes.

    The baseline trains on the same tokens in both cases, because fewer ranks make more
    micro-batches.
    """
    first = config.for_island(0)
    ranks = sum(config.for_island(index).ranks for index in range(len(config.islands)))
    is_one_process = not config.outer.network.leaves_process and len(config.islands) > 1
    return first.ranks if is_one_process or (shares.by_island[0] and ranks > num_gpus) else ranks


def check_baseline(config: Config, ranks: int) -> None:
    """Raise ConfigError if the tokens of a step of all islands do not divide evenly over all
    ranks.
    """
    if config.stages or config.data.owners:
        what = "stages" if config.stages else "sources that only some islands read"
        raise ConfigError(
            f"--baseline trains one island on one text, and the run has {what}; leave out one of "
            "them"
        )
    first = config.for_island(0)
    together = config.optimizer.tokens_per_step * len(config.islands)
    micro_batch = 1 if "micro_batch" in first.auto else first.micro_batch
    unit = config.data.seq_len * micro_batch * ranks
    if together % unit:
        raise ConfigError(
            f"--baseline: {together} tokens of a step do not divide over {ranks} ranks with "
            f"micro-batches of {micro_batch} x {config.data.seq_len} tokens; make "
            f"optimizer.tokens_per_step x islands a multiple of {unit}, or lower island.micro_batch"
        )


def supervise(
    fleet: Fleet, injector: FaultInjector, dashboard: Dashboard, console: Console
) -> None:
    """Inject faults and show the run until it is over. A failing child is reported at once."""
    reported: set[str] = set()
    with dashboard:
        is_over = False
        while not is_over:
            # The end of the run is checked first, so that a failure that ends the run is still
            # reported below.
            is_over = injector.is_over()
            injector.poll()
            for child in fleet.islands.values():
                dashboard.add_island(child.name)
            dashboard.update()
            for child in fleet.started:
                if (
                    child.exit_code
                    and child.mark not in reported
                    and not injector.ended_by_fault(child)
                ):
                    reported.add(child.mark)
                    print_failure(child, console)
            if not is_over:
                time.sleep(POLL_SECONDS)
