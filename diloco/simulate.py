"""`diloco simulate`: all islands of a run on this machine, as real processes, and what came of it."""

import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from diloco.bootstrap import PREFIX
from diloco.check import bigram_yardstick, check_run, model_params
from diloco.config import Config, ConfigError, dump_config, load_config
from diloco.live import LiveView
from diloco.processes import Child, start, stop, torchrun
from diloco.report import write_report
from diloco.runfiles import RunFacts, write_atomically, write_facts
from diloco.summary import print_summary, write_summary

POLL_SECONDS = 0.25
BOOTSTRAP_SECONDS = 60.0


def simulate(path: Path, overrides: list[str], islands: int | None, ranks: int | None, *, with_baseline: bool) -> int:
    """The exit status: 0 when at least one island finished the run, 130 after Ctrl-C or SIGTERM."""
    config = sized(load_config(path, overrides), islands, ranks)
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
    console = Console()
    console.print(
        f"{num_islands} islands, {facts.num_params:,} parameters, {config.total_steps} inner steps: {run_dir}"
    )
    children: list[Child] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        finished = run_islands(config, run_dir, children, console)
        stop(children)
        if with_baseline and finished:
            finished = run_baseline(config, run_dir, children, console)
    except KeyboardInterrupt:
        console.print("stopping")
        return 130
    finally:
        stop(children)
    print_summary(write_summary(run_dir), console)
    console.print(f"report: {write_report(run_dir)}", soft_wrap=True)
    return 0 if finished else 1


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
    if config.outer.transport == "loopback" and count > 1:
        raise ConfigError(
            "outer.transport is 'loopback', which joins islands of one process only; "
            "simulate starts real processes: use outer.transport=gloo or outer.transport=hivemind"
        )
    outer = config.outer.model_copy(update={"start_islands": count})
    return config.model_copy(update={"islands": tuple(listed), "outer": outer})


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


def run_islands(config: Config, run_dir: Path, children: list[Child], console: Console) -> bool:
    """Start what the run needs, show it until all islands have ended; whether any finished."""
    overrides = [f"name={run_dir.name}", f"island.run_dir={run_dir.parent}"]
    if config.outer.transport != "loopback":
        address = start_bootstrap(config, run_dir, children)
        overrides.append(f"island.bootstrap=[{address}]")
    names = [config.for_island(index).island for index in range(len(config.islands))]
    islands = [
        start(
            name,
            torchrun(
                config.for_island(index).ranks,
                ["train", str(run_dir / "config.yaml"), *overrides, f"island.index={index}"],
            ),
            run_dir / name / "log.txt",
        )
        for index, name in enumerate(names)
    ]
    children.extend(islands)
    watch(islands, LiveView(run_dir, names, config.total_steps, console), console)
    return any(island.exit_code == 0 for island in islands)


def start_bootstrap(config: Config, run_dir: Path, children: list[Child]) -> str:
    """The address of a bootstrap process of this run's kind."""
    kind = "tcp" if config.outer.transport == "gloo" else "dht"
    host = config.island.listen_host
    command = [sys.executable, "-m", "diloco", "bootstrap", "--rendezvous", kind, "--host", host]
    child = start("bootstrap", command, run_dir / "bootstrap.txt")
    children.append(child)
    deadline = time.monotonic() + BOOTSTRAP_SECONDS
    while time.monotonic() < deadline and child.exit_code is None:
        for line in child.log.read_text(errors="replace").splitlines():
            if line.startswith(PREFIX):
                return line.removeprefix(PREFIX)
        time.sleep(POLL_SECONDS)
    raise ConfigError(f"the bootstrap process gave no address within {BOOTSTRAP_SECONDS:.0f} s:\n{child.log_tail()}")


def run_baseline(config: Config, run_dir: Path, children: list[Child], console: Console) -> bool:
    """Train data-parallel on all islands' ranks together; whether it finished."""
    console.print("baseline: synchronous data-parallel training on the same tokens")
    ranks = baseline_ranks(config)
    arguments = ["baseline", str(run_dir / "config.yaml"), f"name={run_dir.name}", f"island.run_dir={run_dir.parent}"]
    arguments += ["--islands", str(len(config.islands)), "--ranks", str(ranks)]
    child = start("baseline", torchrun(ranks, arguments), run_dir / "baseline" / "log.txt")
    children.append(child)
    watch([child], LiveView(run_dir, ["baseline"], config.total_steps, console), console)
    return child.exit_code == 0


def baseline_ranks(config: Config) -> int:
    """All ranks of all islands."""
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


def watch(children: list[Child], view: LiveView, console: Console) -> None:
    """Show the run until every child has ended; say at once, with its last lines, when one fails."""
    told: set[str] = set()
    with view:
        while any(child.exit_code is None for child in children):
            view.update()
            for child in children:
                if child.exit_code and child.name not in told:
                    told.add(child.name)
                    console.print(f"{child.name} ended with status {child.exit_code}; the end of {child.log}:")
                    console.print(child.log_tail(), markup=False, highlight=False)
            time.sleep(POLL_SECONDS)
        view.update()
