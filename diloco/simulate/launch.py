"""`diloco simulate`: all islands of a run on this machine, as real processes, and what came of it."""

import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from rich.console import Console

from diloco.check import bigram_yardstick, check_run, model_params
from diloco.config import Config, ConfigError, dump_config, load_config
from diloco.fault_spec import BOOTSTRAP, check_faults, parse_fault
from diloco.fleet import Fleet, settle, start_bootstrap, start_in, start_island, start_joiner
from diloco.in_process import in_one_process, run_in_process
from diloco.inflict import Inflictor
from diloco.initial import pinned
from diloco.links import carried, opened_links, parse_links, relay_warning
from diloco.live import LiveView
from diloco.netns import check_possible
from diloco.processes import Child, stop, torchrun
from diloco.report import write_report
from diloco.runfiles import BASELINE, RunFacts, island_folders, write_atomically, write_facts
from diloco.storm import storm
from diloco.summary import write_summary
from diloco.summary_table import print_summary

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Trouble:
    """What is inflicted on a run: faults and links as written, a storm's faults an island and minute, their number."""

    faults: tuple[str, ...] = ()
    storm: float | None = None
    storm_seed: int = 0
    storm_count: int | None = None
    netns: bool = False
    links: tuple[str, ...] = ()

    @property
    def has_faults(self) -> bool:
        """Whether anything is inflicted."""
        return bool(self.faults) or self.storm is not None

    @property
    def needs_net(self) -> bool:
        """Whether islands must have namespaces."""
        return self.netns or bool(self.links) or any(parse_fault(spec).kind == "cut" for spec in self.faults)


NO_TROUBLE = Trouble()


def simulate(
    path: Path,
    overrides: list[str],
    islands: int | None,
    ranks: int | None,
    *,
    with_baseline: bool,
    trouble: Trouble = NO_TROUBLE,
    in_process: bool = False,
) -> int:
    """The exit status: 0 when at least one island finished the run, 130 after Ctrl-C or SIGTERM."""
    config = sized(pinned(load_config(path, overrides)), islands, ranks)
    if in_process:
        config = in_one_process(config, has_trouble=trouble != NO_TROUBLE)
    else:
        check_transport(config)
    links = parse_links(trouble.links, len(config.islands))
    check_trouble(trouble, config)
    facts, run_dir = prepare(config, with_baseline=with_baseline)
    config = config.model_copy(update={"name": run_dir.name})
    console = Console()
    console.print(
        f"{facts.num_islands} islands, {facts.num_params:,} parameters, {config.total_steps} inner steps: {run_dir}"
    )
    started: list[Child] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        with opened_links(links) if trouble.needs_net else nullcontext() as net:
            fleet = Fleet(run_dir, started, net=net, links=links, has_trouble=trouble.has_faults)
            if net is not None and (warning := relay_warning(net, links, len(config.islands))):
                console.print(warning)
            try:
                finished = (
                    run_in_process(config, run_dir, started, console)
                    if in_process
                    else run_islands(config, run_dir, trouble, fleet, console)
                )
            finally:
                stop(started)
            record_links(fleet, facts, trouble)
        if with_baseline and finished:
            finished = run_baseline(config, run_dir, started, console)
    except KeyboardInterrupt:
        console.print(f"stopping; what came of it so far: diloco report {run_dir}", soft_wrap=True)
        return 130
    finally:
        stop(started)
    tell(run_dir, console)
    return 0 if finished else 1


def tell(run_dir: Path, console: Console) -> None:
    """Print the run's summary, write its report. A disk without room changes nothing in how the run has ended."""
    if not island_folders(run_dir):
        console.print(f"no island has begun; their logs are in {run_dir}", soft_wrap=True)
        return
    try:
        print_summary(write_summary(run_dir), console)
        console.print(f"report: {write_report(run_dir)}", soft_wrap=True)
    except OSError as error:
        console.print(f"no report: {error}; make room, then: diloco report {run_dir}", soft_wrap=True)


def prepare(config: Config, *, with_baseline: bool) -> tuple[RunFacts, Path]:
    """Everything checked that can be, and a new folder that holds the run's config and facts."""
    num_islands = len(config.islands)
    corpus = check_run(config, num_islands)
    if with_baseline:
        check_baseline(config)
    run_dir = new_run_dir(Path(config.island.run_dir), config.name)
    config = config.model_copy(update={"name": run_dir.name})
    write_atomically(run_dir / "config.yaml", dump_config(config))
    facts = RunFacts(
        name=config.name,
        num_params=model_params(config.run, corpus),
        num_islands=num_islands,
        total_steps=config.total_steps,
        bigram_loss=bigram_yardstick(corpus),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_facts(run_dir, facts)
    return facts, run_dir


def check_trouble(trouble: Trouble, config: Config) -> None:
    """Raise ConfigError if a fault is mistyped or cannot be inflicted on this run, or here."""
    has_bootstrap = config.outer.transport != "loopback"
    check_faults([parse_fault(spec) for spec in trouble.faults], len(config.islands), has_bootstrap=has_bootstrap)
    if trouble.needs_net:
        check_possible()


def sized(config: Config, islands: int | None, ranks: int | None) -> Config:
    """The config with as many islands as asked for, all of which the first round waits for."""
    count = islands or len(config.islands) or 1
    listed = (
        [config.islands[i] if i < len(config.islands) else dict(config.islands[-1]) for i in range(count)]
        if config.islands
        else [{} for _ in range(count)]
    )
    if ranks is not None:
        listed = [{**island, "ranks": ranks} for island in listed]
    outer = config.outer.model_copy(update={"start_islands": count})
    return config.model_copy(update={"islands": tuple(listed), "outer": outer})


def check_transport(config: Config) -> None:
    """Raise ConfigError if islands in processes of their own could not find each other."""
    if config.outer.transport == "loopback" and len(config.islands) > 1:
        raise ConfigError(
            "outer.transport is 'loopback', which joins islands of one process only; simulate starts real processes: "
            "use outer.transport=gloo or outer.transport=hivemind, or --in-process"
        )


def new_run_dir(parent: Path, name: str) -> Path:
    """A folder that did not exist: NAME, or NAME-2, NAME-3, ... so that no run is written over."""
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{parent} holds too many runs called {name!r}; choose another name=...")


def run_islands(config: Config, run_dir: Path, trouble: Trouble, fleet: Fleet, console: Console) -> bool:
    """Start what the run needs, inflict the faults, show it until it is over; whether any island finished."""
    faults = [parse_fault(spec) for spec in trouble.faults]
    address = None
    if config.outer.transport != "loopback":
        settle(fleet, BOOTSTRAP)
        address = start_bootstrap(config, run_dir, fleet)
    for index in range(len(config.islands)):
        settle(fleet, index)
        fleet.islands[index] = start_island(config, index, address, faults, fleet)
    if address is not None:
        fleet.join = lambda index: start_joiner(config, index, address, faults, fleet)
    storm_faults = None
    if trouble.storm is not None:
        storm_faults = islice(storm(trouble.storm_seed, trouble.storm, len(config.islands)), trouble.storm_count)
    watch(fleet, Inflictor(fleet, faults, storm_faults), LiveView(run_dir, [], config.total_steps, console), console)
    return any(island.exit_code == 0 for island in fleet.islands.values())


def run_baseline(config: Config, run_dir: Path, started: list[Child], console: Console) -> bool:
    """Train data-parallel on all islands' ranks together; whether it finished."""
    console.print("baseline: synchronous data-parallel training on the same tokens")
    ranks = baseline_ranks(config)
    arguments = ["baseline", str(run_dir / "config.yaml"), f"name={run_dir.name}", f"island.run_dir={run_dir.parent}"]
    arguments += ["--islands", str(len(config.islands)), "--ranks", str(ranks)]
    fleet = Fleet(run_dir, started)
    child = start_in(fleet, 0, BASELINE, torchrun(ranks, arguments), run_dir / BASELINE / "log.txt")
    fleet.islands[0] = child
    watch(fleet, Inflictor(fleet), LiveView(run_dir, [], config.total_steps, console), console)
    return child.exit_code == 0


def record_links(fleet: Fleet, facts: RunFacts, trouble: Trouble) -> None:
    """Put into run.json what the islands' links have carried, if there are any."""
    if fleet.net is None:
        return
    both = {fleet.islands[who].name: carried(fleet.net, fleet.namespaces[who]) for who in fleet.islands}
    sent, received = ({name: ways[i] for name, ways in both.items()} for i in range(2))
    links = " ".join(trouble.links)
    write_facts(fleet.run_dir, replace(facts, links=links, wire_bytes_sent=sent, wire_bytes_received=received))


def baseline_ranks(config: Config) -> int:
    """All ranks of all islands; one for islands of one process, who may be more than this machine has room for."""
    if config.outer.transport == "loopback" and len(config.islands) > 1:
        return 1
    return sum(config.for_island(index).ranks for index in range(len(config.islands)))


def check_baseline(config: Config) -> None:
    """Raise ConfigError if the islands' tokens of a step do not divide over all of their ranks."""
    first, ranks = config.for_island(0), baseline_ranks(config)
    together = config.optimizer.tokens_per_step * len(config.islands)
    unit = config.data.seq_len * first.micro_batch * ranks
    if together % unit:
        raise ConfigError(
            f"--baseline: {together} tokens of a step do not divide over {ranks} ranks with micro-batches of "
            f"{first.micro_batch} x {config.data.seq_len} tokens; make optimizer.tokens_per_step x islands a "
            f"multiple of {unit}, or lower island.micro_batch"
        )


def watch(fleet: Fleet, inflictor: Inflictor, view: LiveView, console: Console) -> None:
    """Inflict faults and show the run until it is over; say at once, with its last lines, when a child fails."""
    told: set[str] = set()
    with view:
        is_over = False
        while not is_over:
            # Asked first: of whatever ended it is told below.
            is_over = inflictor.is_over()
            inflictor.poll()
            for child in fleet.islands.values():
                view.add_island(child.name)
            view.update()
            for child in fleet.started:
                if child.exit_code and child.mark not in told and not inflictor.was_meant(child):
                    told.add(child.mark)
                    console.print(f"{child.name} ended with status {child.exit_code}; from {child.log}:")
                    console.print(child.last_words(), markup=False, highlight=False, soft_wrap=True)
            if not is_over:
                time.sleep(POLL_SECONDS)
