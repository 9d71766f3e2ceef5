"""What the scaling laws and our own runs say about a run: its size, batch, learning rate, loss,
time and energy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from diloco.config.schema import Config
from diloco.formatting import human_count
from diloco.planning.laws.chinchilla import Allocation, best_for_compute, overhead
from diloco.planning.laws.islands import CHECKED, best_batch, best_lr, is_extrapolated, loss_gap

MEASURED_GAPS = {40: 0.148, 80: 0.064, 164: 0.023}
"""Loss gap to data-parallel training, by rounds: 0.148 is 14.8 % worse. Measured with outer
Nesterov 0.7/0.9, 30 inner steps, four islands, 20 tokens per parameter and 249k parameters:
configs/experiments/batch.yaml, three seeds, docs/results.md."""
SHORT_MEMORY_GAPS = {40: 0.102, 80: 0.048, 164: 0.032}
"""The same with outer Nesterov 1/0.6. The momentum of 0.9 above averages over ten rounds and pays
off only in many rounds."""
GAPS_BY_SIZE = {"249k": 0.023, "502k": 0.038, "1M": 0.017}
"""The same by model size, with 164, 327 and 652 rounds: configs/experiments/scaling.yaml."""


@dataclass(frozen=True)
class Fleet:
    """The GPUs, or other ranks, of all islands, and how fast they train."""

    gpus: int
    peak: float
    """Peak operations per second of one GPU."""
    mfu: float
    """Share of the peak that inner steps reach."""
    utilisation: float
    """Share of the time that islands spend on inner steps."""
    watts: float | None = None
    """Power of one GPU, with its share of the machine; None if it was not given."""

    @property
    def flops_per_second(self) -> float:
        """Model operations per second of all GPUs together."""
        return self.gpus * self.peak * self.mfu * self.utilisation


@dataclass(frozen=True)
class LawQuestion:
    """The run and the fleet about which the laws make statements."""

    config: Config
    run: Allocation
    """The model's parameters, and the tokens that all islands train on."""
    flops: float
    """Model operations of the run, attention included."""
    islands: int
    fleet: Fleet
    hours: float | None = None
    """Hours of a budget to spend on the same fleet; None uses the run's own compute."""


def statements(question: LawQuestion) -> Iterator[str]:
    """Yield one line for each statement, with its source in brackets."""
    for name, text, source in [*_budget_lines(question), *_island_lines(question)]:
        yield f"{name:<20}{text} [{source}]"


def _budget_lines(question: LawQuestion) -> Iterator[tuple[str, str, str]]:
    run = question.run
    fleet = question.fleet
    chinchilla = "Chinchilla (2203.15556)"
    ratio = f"{run.tokens / run.params:.3g} tokens per parameter"
    yield (
        "this run",
        f"{_allocation(run)}, {ratio}: {question.flops:.3g} FLOP",
        "the model's own formula",
    )
    seconds = question.flops / fleet.flops_per_second
    speed = f"{fleet.mfu:.0%} of the peak, {fleet.utilisation:.0%} of the time"
    yield "takes", f"{_hours(seconds / 3600)} on {fleet.gpus} GPUs", f"{speed} computing"
    if fleet.watts is not None:
        kwh = fleet.gpus * fleet.watts * seconds / 3.6e6
        yield "energy", f"{kwh:.3g} kWh", f"{fleet.watts:g} W per GPU, all the time"
    yield (
        "overhead",
        f"{100 * overhead(run):.3g} % more compute than the best size for this loss",
        chinchilla,
    )
    budget = run.flops if question.hours is None else 3600 * question.hours * fleet.flops_per_second
    what = "best with its FLOP" if question.hours is None else f"best in {_hours(question.hours)}"
    best = best_for_compute(budget)
    yield (
        what,
        f"{_allocation(best)}; this size has {run.params / best.params:.2g} of its parameters",
        chinchilla,
    )


def _island_lines(question: LawQuestion) -> Iterator[tuple[str, str, str]]:
    config = question.config
    islands = question.islands
    params = question.run.params
    law = "2503.09799" + (", extrapolated" if is_extrapolated(params) else "")
    batch = config.optimizer.tokens_per_step * islands
    yield (
        "batch of all",
        f"{human_count(best_batch(params, islands))} tokens; here {human_count(batch)}",
        law,
    )
    yield "", f"{human_count(best_batch(params, None))} tokens for data-parallel training", law
    yield (
        "inner lr",
        f"{best_lr(params, islands):.2g} with that batch; here {config.optimizer.lr:g}",
        law,
    )
    yield "", f"{best_lr(params, None):.2g} for data-parallel training", law
    outer = config.outer.optimizer
    advice = "grows with islands and inner steps, not with the size"
    yield (
        "outer lr",
        f"{advice}; here {outer.lr:g}, momentum {outer.momentum:g}",
        "2503.09799, as words",
    )
    yield (
        "loss",
        f"{_signed(loss_gap(params, islands))} to data-parallel training, at 20 tokens per "
        "parameter",
        law,
    )
    checked = ", ".join(
        f"{_signed(ours / theirs - 1)} at {size}" for size, (theirs, ours) in CHECKED.items()
    )
    yield "", f"{checked}, measured with four islands", "2503.09799"
    yield (
        "",
        f"{_by_rounds(MEASURED_GAPS)} rounds; here {config.outer.rounds}",
        "docs/results.md, 249k, 4 islands",
    )
    yield (
        "",
        f"{_by_rounds(SHORT_MEMORY_GAPS)} with outer lr 1, momentum 0.6",
        "docs/results.md, 249k, 4 islands",
    )
    sizes = ", ".join(f"{_signed(gap)} at {size}" for size, gap in GAPS_BY_SIZE.items())
    yield "", f"{sizes}, steps of 1024 tokens", "docs/results.md, 4 islands"


def _allocation(allocation: Allocation) -> str:
    return f"{human_count(allocation.params)} parameters on {human_count(allocation.tokens)} tokens"


def _by_rounds(gaps: dict[int, float]) -> str:
    return ", ".join(f"{_signed(gap)} after {rounds}" for rounds, gap in gaps.items())


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _hours(hours: float) -> str:
    return f"{hours:.3g} h" if hours < 48 else f"{hours / 24:.3g} days"
