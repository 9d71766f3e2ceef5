"""`diloco simulate --virtual`: build the run that a config and the command line describe, and print
its results.
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from diloco.config.own_code import load_own_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.faults.disturbances import NO_DISTURBANCES, Disturbances
from diloco.faults.storm import storm
from diloco.formatting import human_bytes, human_seconds, parse_seconds
from diloco.network_emulation.links import parse_links
from diloco.planning.mesh.step_plan import build_step_plan, load_island
from diloco.virtual.faults import parse_faults
from diloco.virtual.results import Results, measure, quantile
from diloco.virtual.run import VirtualRun, run_virtually
from inner.measure.param_specs import averaged_specs
from outer.codecs.choice import build_codec_choice

MODELLED = (
    "Modelled: the time of inner steps, the links, and the bytes of payloads, which are counted "
    "and not moved. Real: agreement, reduce schedule, transfers, leases, failure detection, and "
    "their processor time. Not in it: coding, membership records, packet loss, TCP's slow start."
)


@dataclass(frozen=True)
class VirtualRequest:
    """Flags of the command line as they are written; None if a flag is not given."""

    islands: int | None = None
    step_seconds: str | None = None
    spread: float = 0.0
    host_seconds: str | None = None
    disturbances: Disturbances = NO_DISTURBANCES


def simulate_virtually(path: Path, overrides: list[str], request: VirtualRequest) -> int:
    """Run the islands in virtual time and print the results. Return exit status 1 if an island
    failed, else 0.

    Raises ConfigError and InputError.
    """
    logging.basicConfig(level=logging.ERROR)
    console = Console()
    config = load_own_config(path, overrides)
    run = build_run(config, request)
    results = measure(run_virtually(run))
    print_results(config.name, run.step_seconds, results, console)
    return 1 if results.errors else 0


def build_run(config: Config, request: VirtualRequest) -> VirtualRun:
    """Build the run that a config and the flags describe. Raises ConfigError and InputError."""
    check_can_be_virtual(config)
    asked = request.disturbances
    endless = iter(())
    num_islands = request.islands or max(len(config.islands), config.outer.start_islands)
    if asked.storm is not None:
        endless = storm(asked.storm_seed, asked.storm, num_islands)
    return VirtualRun(
        outer=config.outer,
        specs=averaged_specs(build_step_plan(config.run, load_island(config, 0)).work.sizes),
        num_islands=num_islands,
        step_seconds=parse_step_seconds(request.step_seconds),
        spread=request.spread,
        host_seconds=_parse_duration("--host-seconds", request.host_seconds or "0"),
        links=parse_links(asked.links, num_islands),
        tokens_per_step=config.optimizer.tokens_per_step,
        config_hash=config.run.hash,
        seed=config.seed,
        faults=parse_faults(asked.faults),
        storm=itertools.islice(endless, asked.storm_count),
    )


def check_can_be_virtual(config: Config) -> None:
    """Raise ConfigError, with the cure, for a setting that has no stand-in."""
    outer = config.outer
    problems = []
    if outer.gossip is not None:
        problems.append(
            "outer.gossip is set; only rounds of all islands have a virtual form: set it to null"
        )
    if outer.wait_for != "all":
        problems.append(f"outer.wait_for is {outer.wait_for!r}: use all")
    if outer.experts.every > 1:
        problems.append("outer.experts.every is above 1: set it to 1")
    if outer.moments is not None:
        problems.append("outer.moments is set: set it to null")
    if build_codec_choice(outer).is_gathered:
        problems.append(
            f"outer.codec is {outer.codec!r}, whose payloads all go to all islands: use another "
            "codec"
        )
    if outer.audit > 0:
        problems.append(f"outer.audit is {outer.audit:g}: set it to 0")
    if problems:
        raise ConfigError("--virtual:\n" + "\n".join(f"  {problem}" for problem in problems))


def parse_step_seconds(text: str | None) -> float:
    """Return the seconds of an inner step. Raises ConfigError."""
    if text is None:
        raise ConfigError(
            "--virtual: inner steps are modelled, and their duration is not given: give "
            "--step-seconds, for example --step-seconds 0.5; `diloco plan` estimates it"
        )
    seconds = _parse_duration("--step-seconds", text)
    if seconds <= 0:
        raise ConfigError(
            f"--step-seconds: got {text!r}; allowed: more than 0, for example 0.5 or 500ms"
        )
    return seconds


def _parse_duration(name: str, text: str) -> float:
    """Return the seconds of a flag such as 0.5, 0.5s or 500ms. Raises ConfigError with the flag's
    name.
    """
    try:
        return parse_seconds(text if text.strip()[-1:].isalpha() else f"{text}s")
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def print_results(name: str, step_seconds: float, results: Results, console: Console) -> None:
    """Print all results of a run."""
    table = Table(title=f"Virtual run {name}", title_justify="left")
    table.add_column("")
    table.add_column(
        f"{results.num_islands} islands, inner steps of {step_seconds:g} s", justify="right"
    )
    for what, value in _rows(results):
        table.add_row(what, value)
    console.print(table)
    console.print(_by_kind(results))
    for island, error in results.errors.items():
        console.print(f"{island} has failed: {error}", style="bold red", markup=False)
    console.print(MODELLED, soft_wrap=True)


def _rows(results: Results) -> Iterator[tuple[str, str]]:
    terms = results.terms
    times = results.commit_seconds
    yield "Rounds committed (attempts)", f"{results.num_rounds} ({results.num_attempts})"
    yield (
        "Utilisation",
        "-" if results.utilisation is None else f"{100 * results.utilisation:.1f} %",
    )
    yield "Inner steps in no commit", f"{results.num_steps_lost}"
    yield "States taken from others", f"{results.num_caught_up}"
    longest = times[-1] if times else 0.0
    quantiles = [*(quantile(times, share) for share in (0.5, 0.9)), longest]
    yield "Time to commit: median, p90, max", " / ".join(f"{value:.3f} s" for value in quantiles)
    yield "Round: inner steps", f"{terms.compute:.3f} s"
    yield "Round: waiting for others' inner steps", f"{terms.others:.3f} s"
    yield "Round: plan", f"{terms.plan:.3f} s"
    yield "Round: reduce", f"{terms.reduce:.3f} s"
    yield "Round: own work", f"{terms.host:.3f} s"
    yield "Round: votes", f"{terms.vote:.3f} s"
    yield "Busiest link in use", f"{100 * results.link_share:.1f} %"
    yield "Processor time per round and island (real)", f"{results.cpu_seconds:.4f} s"
    yield (
        f"Most processor time: {results.busiest_cpu[0]}, per round",
        f"{results.busiest_cpu[1]:.4f} s",
    )
    yield (
        f"Most bytes of small messages: {results.busiest_sender[0]}, per round",
        human_bytes(results.busiest_sender[1]),
    )
    yield "Virtual time", human_seconds(results.virtual_seconds)
    yield "First bottleneck", results.bottleneck


def _by_kind(results: Results) -> Table:
    table = Table(title="Sent by an island in a round, replies included", title_justify="left")
    for name in ("kind", "messages", "bytes"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for kind, number in results.messages.items():
        table.add_row(kind, f"{number:.1f}", human_bytes(results.sent_bytes.get(kind, 0.0)))
    control = sum(number for kind, number in results.messages.items() if kind != "payload")
    table.add_row("all but payloads", f"{control:.1f}", human_bytes(_control_bytes(results)))
    return table


def _control_bytes(results: Results) -> float:
    return sum(number for kind, number in results.sent_bytes.items() if kind != "payload")
