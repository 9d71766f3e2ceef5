"""`diloco plan`: what a run costs on given links, and what to set, before anything is launched.

Starts no process and trains nothing. It measures for a moment how fast this machine encodes and, unless it is told how
long an inner step takes, how fast it multiplies matrices.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from diloco.config import Config, ConfigError, load_config
from diloco.mesh_picture import Plan as IslandPlan
from diloco.mesh_picture import island_of, plan_of
from diloco.units import parse_bits_per_second, parse_seconds
from inner.measure.flops import flops_per_token, peak_flops
from outer.config import OuterConfig

if TYPE_CHECKING:
    from diloco.planning.predict import HostSpeed

T = TypeVar("T")
MFU = 0.4
"""Assumed where nothing is measured: what a tuned trainer reaches on GPUs."""
UTILISATION = 0.95
"""Wanted unless another is."""
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked on the command line, as it is written there; None: not given."""

    islands: int | None = None
    bandwidth: str = "1gbit"
    rtt: str = "0ms"
    step_seconds: str | None = None
    flops: str | None = None
    spread: float | None = None
    codec_speed: str | None = None
    utilisation: float | None = None
    tokens: str | None = None


@dataclass(frozen=True)
class StepTime:
    """Of an inner step on the fastest island, how much longer the slowest's takes, and how that is known."""

    seconds: float
    spread: float
    source: str


def show_plan(path: Path, overrides: list[str], question: Question, console: Console) -> bool:
    """Print the plan; False when the run as it is configured does not reach a utilisation that is asked for.

    Raises ConfigError or InputError.
    """
    config = load_config(path, overrides)
    bits_per_second = _flag("--bandwidth", parse_bits_per_second, question.bandwidth)
    rtt_seconds = _flag("--rtt", parse_seconds, question.rtt)
    tokens = None if question.tokens is None else _flag("--tokens", parse_count, question.tokens)
    codec_bytes = None if question.codec_speed is None else _flag("--codec-speed", parse_count, question.codec_speed)
    islands = [plan_of(config.run, island_of(config, i)) for i in range(max(1, len(config.islands)))]
    step = step_time(config, islands, question)

    # Only now: a mistake is answered without waiting for torch.
    from diloco.planning.advice import ladder
    from diloco.planning.predict import Case, Link
    from diloco.planning.specs import specs_of
    from diloco.planning.table import Picture, print_plan

    speed_of = _speeds(codec_bytes)
    case = Case(
        outer=config.outer,
        specs=specs_of(islands[0].work.sizes),
        num_islands=question.islands or max(len(config.islands), config.outer.start_islands),
        step_seconds=step.seconds,
        link=Link(bits_per_second, rtt_seconds),
        speed=speed_of(config.outer),
        ranks=islands[0].work.degrees.num_ranks,
        spread=step.spread,
    )
    target = question.utilisation or UTILISATION
    rungs = ladder(case, target, speed_of)
    print_plan(Picture(config, islands[0], step.source, rungs, target, tokens), console)
    return question.utilisation is None or rungs[0].prediction.utilisation >= target


def parse_count(text: str) -> float:
    """`10B` as 1e10; above 0. Raises ConfigError, which does not say where it was written."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?) ?([kmbgtp]?)", text.strip().lower().replace("_", ""))
    value = float(found[1]) * COUNTS[found[2]] if found else 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{text!r} is not a count; allowed: a number above 0, with k, M, G or B, T or P, as in 10B")
    return value


def step_time(config: Config, islands: list[IslandPlan], question: Question) -> StepTime:
    """As given, or by the operations of a step. Raises ConfigError."""
    if question.step_seconds is not None:
        seconds = _flag("--step-seconds", _step_seconds, question.step_seconds)
        return StepTime(seconds, question.spread or 0.0, "as given")
    peak, source = _peak(config, question.flops)
    times = []
    for island in islands:
        flops = flops_per_token(island.work.sizes, config.data.seq_len).total * config.optimizer.tokens_per_step
        times.append(flops / (island.work.degrees.num_ranks * peak * MFU))
    spread = max(times) / min(times) - 1 if question.spread is None else question.spread
    return StepTime(min(times), spread, f"{source}, {MFU:.0%} of it assumed; or give --step-seconds")


def _peak(config: Config, given: str | None) -> tuple[float, str]:
    """Operations a second of a rank, and how that is known."""
    if given is not None:
        peak = _flag("--flops", parse_count, given)
        return peak, f"{_flops(peak)} a rank"
    import torch

    island = config.for_island(0)
    has_gpu = torch.cuda.is_available()
    if island.device == "cuda" and not has_gpu:
        raise ConfigError(
            "island.device is 'cuda', and this machine has no GPU to measure; give --step-seconds, or --flops of a "
            "rank, for example --flops 400T"
        )
    device = "cuda:0" if has_gpu and island.device != "cpu" else "cpu"
    peak = peak_flops(device, island.compute_dtype)
    if peak is None:
        raise ConfigError(
            f"this machine's {device} multiplies no {island.compute_dtype}; give --step-seconds or --flops"
        )
    return peak, f"{_flops(peak)} a rank, measured on this machine's {'CPU' if device == 'cpu' else 'GPU'}"


def _flops(peak: float) -> str:
    return f"{peak / 1e12:.3g} TFLOP/s" if peak >= 1e12 else f"{peak / 1e9:.3g} GFLOP/s"


def _step_seconds(text: str) -> float:
    seconds = parse_seconds(text if text.strip()[-1:].isalpha() else f"{text}s")
    if seconds == 0:
        raise ConfigError(f"{text!r} is no time; allowed: more than 0, for example 0.2 or 200ms")
    return seconds


def _speeds(codec_bytes: float | None) -> "Callable[[OuterConfig], HostSpeed]":
    """How fast the host works with a codec, measured; `codec_bytes`: of fp32 that it codes in a second, if given."""
    from diloco.planning.host_speed import measure

    def speed_of(outer: OuterConfig) -> "HostSpeed":
        speed = measure(outer)
        return speed if codec_bytes is None else replace(speed, encode=4 / codec_bytes, decode=4 / codec_bytes)

    return speed_of


def _flag(name: str, parse: Callable[[str], T], text: str) -> T:
    """The flag's value. Raises ConfigError that names it."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
