"""Statistics of paired runs: mean, spread, and the difference to a baseline with its confidence
interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. `half_width`: half the width of its confidence interval; None with one
    seed.
    """

    mean: float
    half_width: float | None
    num_seeds: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def compare(losses: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """Return the losses relative to the baseline's losses with the same seeds (0.01 is 1 % worse);
    None without a pair.

    Runs of equal seeds are paired because the seed sets the weights and the text, which change both
    losses together.
    """
    pairs = [losses[seed] / baseline[seed] - 1 for seed in sorted(losses.keys() & baseline.keys())]
    return estimate(pairs) if pairs else None


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value, with Student's confidence interval."""
    half_width = None
    if len(values) > 1:
        half_width = student_t(CONFIDENCE, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(fmean(values), half_width, len(values))


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample; None for fewer than two values."""
    return stdev(values) if len(values) > 1 else None


def student_t(confidence: float, degrees: int) -> float:
    """Return the t with P(|T| < t) = confidence, for Student's T with `degrees` degrees of freedom:
    4.303 for 0.95 and 2.
    """
    low = 0.0
    high = 1.0
    while central_probability(high, degrees) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if central_probability(middle, degrees) < confidence else (low, middle)
        )
    return high


def central_probability(t: float, degrees: int) -> float:
    """Return P(|T| < t) of Student's T: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    is_odd = degrees % 2
    term = total = (math.cos(angle) if degrees > 1 else 0.0) if is_odd else 1.0
    for k in range(3 if is_odd else 2, degrees, 2):
        term *= square * (k - 1) / k
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
