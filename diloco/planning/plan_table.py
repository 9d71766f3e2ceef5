"""The output of `diloco plan`: tables, notes and the verdict."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from diloco.config.schema import Config
from diloco.formatting import human_bytes, human_count, human_duration, human_rate, percent
from diloco.planning.advice import Rung, needed_bandwidth
from diloco.planning.expert_traffic import list_sent
from diloco.planning.mesh.host_memory import estimate_host_memory
from diloco.planning.mesh.picture import header, print_section, print_text
from diloco.planning.mesh.step_plan import StepPlan
from diloco.planning.mesh.traffic import plain_table
from diloco.planning.predict import CONTROL_TRIPS, PAYLOAD_TRIPS, Case, Prediction
from diloco.planning.state_times import count_state_bytes
from diloco.planning.utilisation import Model, diloco, streaming, utilisation
from inner.measure.param_specs import num_elements
from outer.cost import round_bytes


@dataclass(frozen=True)
class Picture:
    """All that the plan shows."""

    config: Config
    island: StepPlan
    """The inner step of the first island."""
    step_source: str
    """Where the duration of an inner step comes from."""
    rungs: list[Rung]
    """The run as configured, followed by better settings."""
    target: float
    tokens: float | None
    """Number of tokens for which the duration is predicted; None uses the run's own number."""
    disk: float
    """Bytes per second that an island's ranks together write to their disk, or read from it."""

    @property
    def case(self) -> Case:
        return self.rungs[0].case

    @property
    def run_tokens(self) -> float:
        """Tokens that all islands of the run train on."""
        return (
            self.config.run.total_steps
            * self.config.optimizer.tokens_per_step
            * self.case.num_islands
        )

    @property
    def prediction(self) -> Prediction:
        return self.rungs[0].prediction


def print_plan(picture: Picture, console: Console) -> None:
    """Print the whole plan."""
    case = picture.case
    p = picture.prediction
    link = (
        f"{human_rate(case.link.bits_per_second)}, round trip "
        f"{human_duration(case.link.rtt_seconds)}"
    )
    islands = f"{case.num_islands} island{'s' * (case.num_islands > 1)}"
    print_text(console, f"{picture.config.name}, {islands}, each on a link of {link}", "bold")
    print_text(console, header(picture.config.run, picture.island))
    print_text(console, _outer_line(picture))
    print_text(
        console,
        f"       {human_duration(case.step_seconds)} per inner step ({picture.step_source})",
    )
    cycle = f"a cycle of {p.inner_steps} inner steps averages all parameters"
    print_section(
        console, f"Computes {percent(p.utilisation)} of the time; {cycle}", terms_table(case, p)
    )
    console.print()
    for line in notes(picture):
        print_text(console, line)
    if (sent := sent_table(case)) is not None:
        print_section(console, "What an island sends per cycle, by experts", sent)
    print_section(console, "What a rank holds on the host (estimate)", memory_table(picture))
    print_section(console, "Saving, joining and coming back", state_table(picture))
    settings = (
        f"Settings up to {percent(picture.target)}, line by line; bits per parameter and inner step"
    )
    print_section(console, settings, advice_table(picture))
    console.print()
    for line in assumptions(picture):
        print_text(console, line, "bold yellow")
    print_text(console, verdict(picture), "bold green" if _is_reached(picture) else "bold red")


def assumptions(picture: Picture) -> Iterator[str]:
    """Yield warnings about assumptions behind the recommendation that may be wrong."""
    if picture.island.is_vocabulary_assumed:
        yield (
            f"warning: all of this is for a vocabulary of {picture.island.work.sizes.vocab_size}, "
            f"as the tokenizer {picture.config.data.tokenizer!r} is not on this machine: a larger "
            "vocabulary means more parameters to send; give its size by model.vocab_size=N behind "
            "the command, or call `diloco prepare` before"
        )


def terms_table(case: Case, prediction: Prediction) -> Table:
    """Return a table of the terms of a cycle's time."""
    table = plain_table(("",), ("seconds", "share"))
    table.add_column("")
    for name, seconds, note in _terms(case, prediction):
        table.add_row(
            name, human_duration(seconds), percent(seconds / prediction.total_seconds), note
        )
    table.add_row("total", human_duration(prediction.total_seconds), percent(1.0), "")
    return table


def _terms(case: Case, p: Prediction) -> Iterator[tuple[str, float, str]]:
    outer = case.outer
    rtt = human_duration(case.link.rtt_seconds)
    trips = (CONTROL_TRIPS + PAYLOAD_TRIPS) * outer.fragments
    sent = f"{human_bytes(p.sent_bytes)} each way"
    yield "inner steps", p.compute_seconds, f"{p.inner_steps} x {human_duration(case.step_seconds)}"
    yield "transfer", p.transfer_seconds, f"of {human_duration(p.busy_transfer_seconds)} for {sent}"
    yield "round trips", p.trip_seconds, f"{trips:g} x {rtt}, TCP's slow start, handling payloads"
    yield (
        "codec",
        p.codec_seconds,
        f"of {human_duration(p.busy_codec_seconds)} of {outer.codec}, beside the transfer",
    )
    yield "outer step", p.step_seconds, "with the digest of the new state"
    yield "snapshot", p.copy_seconds, "copying local params, and writing back"
    yield "slowest island", p.spread_seconds, _spread_note(case)


def _spread_note(case: Case) -> str:
    if case.outer.local_steps != "fixed":
        return "makes fewer inner steps"
    return (
        f"its steps take {percent(case.spread)} longer"
        if case.spread
        else "equal speed assumed; see --spread"
    )


def notes(picture: Picture) -> Iterator[str]:
    """Yield further results, one line each."""
    case = picture.case
    p = picture.prediction
    if p.hidden_seconds:
        yield (
            f"behind inner steps  {human_duration(p.hidden_seconds)} per cycle, not in the "
            "terms above"
        )
    bits = (
        f"{8 * p.sent_bytes / p.num_params:.3g} bits per parameter, "
        f"{p.bits_per_param_step:.3g} per inner step"
    )
    yield f"sent by an island   {human_bytes(p.sent_bytes)} per cycle: {bits}"
    yield f"with {_tokens(picture)}"
    yield (
        f"published model     {percent(published_utilisation(picture))} (2501.18512: one-way "
        "bytes, nothing else)"
    )
    if p.is_codec_slower:
        busy = human_duration(p.busy_codec_seconds)
        transfer = human_duration(p.busy_transfer_seconds)
        yield (
            f"WARNING: {case.outer.codec} is slower than the link it serves: {busy} for "
            f"{transfer} of transfer"
        )


def _tokens(picture: Picture) -> str:
    """Return a text with the number of tokens and the time that training on them takes."""
    config = picture.config
    case = picture.case
    p = picture.prediction
    a_cycle = case.num_islands * config.optimizer.tokens_per_step * p.inner_steps
    tokens = picture.tokens or picture.run_tokens
    seconds = tokens / a_cycle * p.total_seconds
    counted = f"{human_count(tokens)} tokens".ljust(13)
    return (
        f"{counted}  {human_duration(seconds)}, {human_count(tokens / seconds)} tokens/s in "
        "all islands"
    )


def published_utilisation(picture: Picture) -> float:
    """Return the utilisation of the run by the model of diloco/planning/utilisation.py."""
    case = picture.case
    outer = picture.case.outer
    sizes = picture.island.work.sizes
    rounds = round_bytes(outer, case.specs, case.num_islands)
    num_params = num_elements(case.specs)
    # The published model counts one-way bytes only: the means of a cycle.
    bits = 8 * sum(sent.mean_bytes for sent in rounds) / num_params * outer.fragments / len(rounds)
    model = Model(
        num_layers=sizes.num_layers, num_params=num_params, step_seconds=case.step_seconds
    )
    if outer.fragments == 1:
        method = diloco(model, outer.inner_steps, delay=outer.delay, bits=bits)
    else:
        pattern = "sequential" if outer.fragment_pattern == "sequential" else "strided"
        count = min(outer.fragments, sizes.num_layers)
        method = streaming(
            model, outer.inner_steps, fragments=count, delay=outer.delay, bits=bits, pattern=pattern
        )
    return float(utilisation(model, method, np.array([case.link.bits_per_second / 1e9]))[0])


def memory_table(picture: Picture) -> Table:
    """Return a table of a rank's host memory by purpose, with the memory of an inner step on a GPU
    for comparison.
    """
    table = plain_table(("",), ("at least", "estimate"))
    config = picture.config
    island = picture.island
    case = picture.case
    first = config.for_island(0)
    host = estimate_host_memory(
        config.run, first, island.device_type, case.specs, case.num_islands, island.memory
    )
    for name, num_bytes in host.certain.items():
        table.add_row(name, human_bytes(num_bytes), human_bytes(num_bytes))
    for name, num_bytes in host.possible.items():
        table.add_row(name, "", human_bytes(num_bytes))
    table.add_row("together", human_bytes(host.least), human_bytes(host.estimate))
    if island.device_type != "cpu":
        table.add_row(
            "for comparison, an inner step on a GPU",
            "",
            human_bytes(max(e.peak for e in island.memory)),
        )
    return table


def sent_table(case: Case) -> Table | None:
    """Return a table of the bytes that an island sends of its experts; None if there are no experts
    or no rounds of all islands.
    """
    rows = (
        [] if case.outer.gossip is not None else list_sent(case.outer, case.specs, case.num_islands)
    )
    table = plain_table(("",), ("sent per cycle",))
    for row in rows:
        table.add_row(row.what, human_bytes(row.num_bytes))
    return table if rows else None


def state_table(picture: Picture) -> Table:
    """Return a table of the bytes of an island's state, and how long they take on the link or
    disk.
    """
    case = picture.case
    state = count_state_bytes(picture.config.run, case.specs, case.num_islands)
    link = case.link.bits_per_second / 8
    disk = f"a disk of {human_bytes(picture.disk)}/s (--disk)"
    rows = (
        ("a checkpoint", state.saved, picture.disk, f"onto {disk}, beside training"),
        ("starting from it", state.saved, picture.disk, f"from {disk}"),
        ("joining", state.joined, link, "the state that all islands share"),
        ("a missed round", state.missed, link, "its means, or a joiner's download if that is less"),
    )
    table = plain_table(("",), ("of an island", "seconds"))
    table.add_column("")
    for what, num_bytes, rate, note in rows:
        table.add_row(what, human_bytes(num_bytes), human_duration(num_bytes / rate), note)
    return table


def advice_table(picture: Picture) -> Table:
    """Return a table of the recommended settings with their predictions."""
    table = plain_table((), ("computes", "sent", "bits"))
    table.add_column("set")
    before: dict[str, Any] = {}
    for rung in picture.rungs:
        p = rung.prediction
        added = {key: value for key, value in rung.changes.items() if before.get(key) != value}
        what = overrides_of(added) if rung.changes else "(as configured)"
        table.add_row(
            percent(p.utilisation), human_bytes(p.sent_bytes), f"{p.bits_per_param_step:.3g}", what
        )
        before = rung.changes
    return table


def verdict(picture: Picture) -> str:
    """Return one line of advice: the settings that reach the target, or why none does."""
    last = picture.rungs[-1]
    goal = percent(picture.target)
    if _is_reached(picture):
        how = f"set {overrides_of(last.changes)}" if last.changes else "as configured"
        return f"{goal}: {how}"
    needed = needed_bandwidth(last.case, picture.target)
    if needed is None:
        return (
            f"No setting reaches {goal}, even on a faster link: the host's work and waiting "
            "take the rest of the time"
        )
    return (
        f"No setting reaches {goal} on this link; the settings of the last line reach it with "
        f"{human_rate(needed)}"
    )


def overrides_of(changes: Mapping[str, Any]) -> str:
    """Return changes to the `outer` section as command-line overrides."""
    return " ".join(f"outer.{key}={value}" for key, value in changes.items())


def _outer_line(picture: Picture) -> str:
    outer = picture.case.outer
    fragments = f"{outer.fragments} fragment{'s' * (outer.fragments > 1)}"
    settings = f"{outer.inner_steps} inner steps, {fragments}, delay {outer.delay}, {outer.codec}"
    return f"outer  {settings} over {outer.transport}"


def _is_reached(picture: Picture) -> bool:
    return picture.rungs[-1].prediction.utilisation >= picture.target
