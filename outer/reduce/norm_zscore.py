"""Finds parts whose norm is far above the participant's recent norms: EDiT's filter (2412.07210),
part by part.

    delta = norm - mean      mean <- mean + alpha delta      variance <- (1 - alpha) (variance +
                             alpha delta^2)

z = delta / sqrt(variance). After WARM_UP norms, a norm is an anomaly if z > bound x max(1, standard
deviation of recent z). The mean and variance of z follow the same rule, and the mean starts at the
first norm. The authors' code keeps a window of z and starts at zero, which widens the variance for
longer than the warm-up.
"""

from math import isfinite, sqrt
from typing import NamedTuple

import torch

from outer.errors import InputError

ALPHA = 0.02
WARM_UP = 120
"""Number of norms that are recorded before the first one is judged."""
LEAST_SPREAD = 1e-6
"""Smallest standard deviation, relative to the mean; norms closer than this differ only by
rounding.
"""


class History(NamedTuple):
    """Running statistics of one participant's norms of one part."""

    count: float
    mean: float
    variance: float = 0.0
    z_mean: float = 0.0
    z_variance: float = 0.0
    """Mean and variance of z, from the norms after the warm-up."""


def is_anomalous(history: History | None, norm: float, bound: float) -> bool:
    """Return whether the norm is more than the bound above the history's mean. A small norm
    never is.
    """
    if history is None or history.count < WARM_UP:
        return False
    return z_score(history, norm) > bound * max(1.0, sqrt(history.z_variance))


def update_history(history: History | None, norm: float) -> History:
    """Return the history with one more norm."""
    if history is None:
        return History(count=1.0, mean=norm)
    mean, variance = _update(history.mean, history.variance, norm)
    z_mean = history.z_mean
    z_variance = history.z_variance
    if history.count >= WARM_UP:
        z_mean, z_variance = _update(z_mean, z_variance, z_score(history, norm))
    return History(history.count + 1, mean, variance, z_mean, z_variance)


def z_score(history: History, norm: float) -> float:
    """Return the number of standard deviations by which the norm exceeds the mean; 0 if all
    norms so far are zero.
    """
    spread = max(sqrt(history.variance), LEAST_SPREAD * history.mean)
    return (norm - history.mean) / spread if spread > 0 else 0.0


def to_tensor(history: History) -> torch.Tensor:
    """Return the history's fields in order, fp64, for a checkpoint."""
    return torch.tensor(history, dtype=torch.float64)


def parse_history(values: torch.Tensor) -> History:
    """Read a history from a checkpoint's tensor. Raises InputError if the values are not valid."""
    found = History(*values.tolist())
    if (
        not all(map(isfinite, found))
        or min(found.count, found.mean, found.variance, found.z_variance) < 0
    ):
        raise InputError(f"the checkpoint's history of a part's norms is not valid: {found}")
    return found


def _update(mean: float, variance: float, value: float) -> tuple[float, float]:
    delta = value - mean
    return mean + ALPHA * delta, (1 - ALPHA) * (variance + ALPHA * delta * delta)
