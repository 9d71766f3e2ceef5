"""`diloco plan`: predict what a run costs on given links, and recommend settings.

It starts no process and trains nothing. It briefly measures how fast this machine encodes and,
unless the duration of an inner step is given, how fast it multiplies matrices.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from diloco.config.own_code import load_own_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.formatting import parse_bits_per_second, parse_seconds
from diloco.planning.mesh.gpus import find_gpu
from diloco.planning.mesh.picture import print_section
from diloco.planning.mesh.request import parse_bytes
from diloco.planning.mesh.seconds import MFU, compute_seconds
from diloco.planning.mesh.step_plan import StepPlan, build_step_plan, load_island
from inner.flops import flops_per_token
from inner.measure.peak_flops import peak_flops
from outer.config import OuterConfig

if TYPE_CHECKING:
    from diloco.planning.plan_table import Picture
    from outer.cost import HostSpeed

T = TypeVar("T")
UTILISATION = 0.95
"""Default target of the recommendations."""
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Flags of the command line as they are written; None if a flag is not given."""

    islands: int | None = None
    bandwidth: str = "1gbit"
    rtt: str = "0ms"
    disk: str = "1GB"
    step_seconds: str | None = None
    flops: str | None = None
    gpu: str | None = None
    spread: float | None = None
    codec_speed: str | None = None
    utilisation: float | None = None
    tokens: str | None = None
    gpus: int | None = None
    watts: float | None = None
    hours: float | None = None


@dataclass(frozen=True)
class StepTime:
    """Duration of an inner step on the fastest island, and how much longer it takes on the
    slowest.
    """

    seconds: float
    spread: float
    """How much longer an inner step takes on the slowest island: 0.1 for 10 %."""
    source: str
    """Where the duration comes from, as text for the user."""


def show_plan(path: Path, overrides: list[str], request: PlanRequest, console: Console) -> bool:
    """Print the plan. Return False if the run as configured does not reach the target utilisation
    of `request`.

    Raises ConfigError or InputError.
    """
    config = load_own_config(path, overrides)
    bits_per_second = _parse("--bandwidth", parse_bits_per_second, request.bandwidth)
    rtt_seconds = _parse("--rtt", parse_seconds, request.rtt)
    tokens = None if request.tokens is None else _parse("--tokens", parse_count, request.tokens)
    codec_bytes = (
        None
        if request.codec_speed is None
        else _parse("--codec-speed", parse_count, request.codec_speed)
    )
    disk = parse_bytes("--disk", request.disk)
    if request.gpus is None and (request.watts or request.hours):
        raise ConfigError(
            "--watts and --hours describe the GPUs: also give --gpus, the number of GPUs in all "
            "islands"
        )
    islands = [
        build_step_plan(config.run, load_island(config, i))
        for i in range(max(1, len(config.islands)))
    ]
    step = step_time(config, islands, request)

    # Imported here because these modules import torch: mistakes in flags are reported without
    # waiting for it.
    from diloco.planning.advice import ladder
    from diloco.planning.plan_table import Picture, print_plan
    from diloco.planning.predict import Case, LinkSpeed
    from inner.measure.param_specs import averaged_specs

    measure = _build_measure(codec_bytes)
    case = Case(
        outer=config.outer,
        specs=averaged_specs(islands[0].work.sizes),
        num_islands=request.islands or max(len(config.islands), config.outer.start_islands),
        step_seconds=step.seconds,
        link=LinkSpeed(bits_per_second, rtt_seconds),
        speed=measure(config.outer),
        ranks=islands[0].work.degrees.num_ranks,
        spread=step.spread,
    )
    target = request.utilisation or UTILISATION
    rungs = ladder(case, target, measure)
    picture = Picture(config, islands[0], step.source, rungs, target, tokens, disk)
    print_plan(picture, console)
    if request.gpus is not None:
        show_laws(picture, request, console)
    return request.utilisation is None or rungs[0].prediction.utilisation >= target


def show_laws(picture: "Picture", request: PlanRequest, console: Console) -> None:
    """Print what scaling laws say about the run on `request.gpus` GPUs, equally many of each kind.
    Raises ConfigError.
    """
    from diloco.planning.laws.chinchilla import Allocation
    from diloco.planning.laws.statements import Fleet, LawQuestion, statements
    from inner.measure.param_specs import num_active

    config = picture.config
    case = picture.case
    sizes = picture.island.work.sizes
    assert request.gpus is not None, "show_laws needs --gpus"
    peaks, source = _peaks(config, request)
    fleet = Fleet(
        request.gpus, sum(peaks) / len(peaks), MFU, picture.prediction.utilisation, request.watts
    )
    tokens = picture.tokens or picture.run_tokens
    flops = tokens * flops_per_token(sizes, config.data.seq_len).total
    # The laws were fitted to dense models. By compute, a mixture of experts is a model of the size
    # that a token uses.
    run = Allocation(num_active(sizes), tokens)
    question = LawQuestion(config, run, flops, case.num_islands, fleet, request.hours)
    title = "What scaling laws and our runs say"
    if sizes.experts is not None:
        title += " of a dense model with as many parameters as a token uses"
    print_section(console, f"{title}; {source}", "\n".join(statements(question)))


def parse_count(text: str) -> float:
    """Parse a positive count such as `10B` (1e10). Raises ConfigError with a message that does not
    name the flag.
    """
    found = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?) ?([kmbgtp]?)", text.strip().lower().replace("_", "")
    )
    value = float(found[1]) * COUNTS[found[2]] if found else 0.0
    if not 0 < value < math.inf:
        raise ConfigError(
            f"got {text!r}; allowed: a count above 0, with k, M, G or B, T or P behind it, as in "
            "10B"
        )
    return value


def step_time(config: Config, islands: list[StepPlan], request: PlanRequest) -> StepTime:
    """Return the duration given on the command line, or else an estimate from the step's
    operations. Raises ConfigError.
    """
    if request.step_seconds is not None:
        seconds = _parse("--step-seconds", _step_seconds, request.step_seconds)
        return StepTime(seconds, request.spread or 0.0, "as given")
    peaks, source = _peaks(config, request)
    tokens = config.optimizer.tokens_per_step
    num_islands = max(len(islands), len(peaks))
    # With a single plan or a single peak, it holds for all islands.
    plans = islands * (num_islands // len(islands))
    rates = peaks * (num_islands // len(peaks))
    times = [
        compute_seconds(plan.work, tokens, rate) for plan, rate in zip(plans, rates, strict=True)
    ]
    spread = max(times) / min(times) - 1 if request.spread is None else request.spread
    return StepTime(
        min(times), spread, f"{source}, {MFU:.0%} of it assumed; or give --step-seconds"
    )


def _peaks(config: Config, request: PlanRequest) -> tuple[list[float], str]:
    """Return the peak operations per second of a rank (one value for all islands, or one for each)
    and their source.
    """
    if request.gpu is not None:
        return _peaks_of_gpus(config, request)
    if request.flops is not None:
        peak = _parse("--flops", parse_count, request.flops)
        return [peak], f"{_flops(peak)} per rank"
    import torch

    island = config.for_island(0)
    has_gpu = torch.cuda.is_available()
    if island.device == "cuda" and not has_gpu:
        raise ConfigError(
            "island.device is 'cuda', and this machine has no GPU to measure; give "
            "--step-seconds, or the peak of a rank by --flops, for example --flops 400T"
        )
    device = "cuda:0" if has_gpu and island.device != "cpu" else "cpu"
    dtype = island.resolve_compute_dtype(device)
    peak = peak_flops(device, dtype)
    if peak is None:
        raise ConfigError(
            f"this machine's {device} cannot multiply {dtype}; give --step-seconds or --flops"
        )
    return [
        peak
    ], f"{_flops(peak)} per rank, measured on this machine's {'CPU' if device == 'cpu' else 'GPU'}"


def _peaks_of_gpus(config: Config, request: PlanRequest) -> tuple[list[float], str]:
    """Return the peaks of the GPUs of --gpu from their makers' data sheets, and the source. Raises
    ConfigError.
    """
    names = (request.gpu or "").split(",")
    num_islands = max(len(config.islands), 1)
    if request.flops is not None:
        raise ConfigError("--gpu and --flops both give the peak of a rank; give one of them")
    if len(names) > 1 and num_islands not in (1, len(names)):
        raise ConfigError(
            f"--gpu: got {len(names)} kinds of GPU ({request.gpu}) for the config's {num_islands} "
            f"islands; allowed: one kind for all islands, or {num_islands} kinds"
        )
    peaks = [_parse("--gpu", find_gpu, name.strip()).flops for name in names]
    return peaks, " and ".join(
        f"{name} with {_flops(peak)}" for name, peak in zip(names, peaks, strict=True)
    )


def _flops(peak: float) -> str:
    return f"{peak / 1e12:.3g} TFLOP/s" if peak >= 1e12 else f"{peak / 1e9:.3g} GFLOP/s"


def _step_seconds(text: str) -> float:
    seconds = parse_seconds(text if text.strip()[-1:].isalpha() else f"{text}s")
    if seconds == 0:
        raise ConfigError(f"got {text!r}; allowed: a duration above 0, for example 0.2 or 200ms")
    return seconds


def _build_measure(codec_bytes: float | None) -> "Callable[[OuterConfig], HostSpeed]":
    """Return a function that measures the host's speed.

    A given `codec_bytes` (fp32 bytes per second) replaces the measured speed of the codec.
    """
    from outer.cost import measure_host_speed

    def measure(outer: OuterConfig) -> "HostSpeed":
        speed = measure_host_speed(outer)
        return (
            speed
            if codec_bytes is None
            else replace(speed, encode=4 / codec_bytes, decode=4 / codec_bytes)
        )

    return measure


def _parse(name: str, parse: Callable[[str], T], text: str) -> T:
    """Return the flag's value, parsed by `parse`. Raises ConfigError with the flag's name in
    front.
    """
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
