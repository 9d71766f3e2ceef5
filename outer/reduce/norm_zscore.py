"""Whether a part is longer than its participant's were of late: EDiT's gate (2412.07210), on the norm of each part.

    delta = norm - mean      mean <- mean + alpha delta      variance <- (1 - alpha) (variance + alpha delta^2)

z = delta / sqrt(variance). The norm is an anomaly when z is over the bound x max(1, standard deviation of recent z),
from WARM_UP norms on. z's own mean and variance move by the same rule, and the mean begins with the first norm: the
authors' code keeps a window of z and begins at zero, which widens the variance for longer than the warm-up.
"""

from math import isfinite, sqrt
from typing import NamedTuple

import torch

from outer.errors import InputError

ALPHA = 0.02
WARM_UP = 120
"""Norms before the first that is judged."""
LEAST_SPREAD = 1e-6
"""Of the mean: norms that differ by less are equal but for rounding."""


class History(NamedTuple):
    """What is kept of one participant's norms of one part."""

    count: float
    mean: float
    variance: float = 0.0
    z_mean: float = 0.0
    z_variance: float = 0.0
    """Of norms after the warm-up."""


def is_anomalous(history: History | None, norm: float, bound: float) -> bool:
    """Whether the norm is so far above the history's mean; a short one never is."""
    if history is None or history.count < WARM_UP:
        return False
    return z_score(history, norm) > bound * max(1.0, sqrt(history.z_variance))


def observed(history: History | None, norm: float) -> History:
    """The history with this norm in it."""
    if history is None:
        return History(count=1.0, mean=norm)
    mean, variance = _moved(history.mean, history.variance, norm)
    z_mean, z_variance = history.z_mean, history.z_variance
    if history.count >= WARM_UP:
        z_mean, z_variance = _moved(z_mean, z_variance, z_score(history, norm))
    return History(history.count + 1, mean, variance, z_mean, z_variance)


def z_score(history: History, norm: float) -> float:
    """How many standard deviations the norm is above the mean; 0 after zeros alone, which say nothing."""
    spread = max(sqrt(history.variance), LEAST_SPREAD * history.mean)
    return (norm - history.mean) / spread if spread > 0 else 0.0


def tensor_of(history: History) -> torch.Tensor:
    """Its fields in order, fp64, for a checkpoint."""
    return torch.tensor(history, dtype=torch.float64)


def history_of(values: torch.Tensor) -> History:
    """The history in a checkpoint's tensor. Raises InputError when it is none."""
    found = History(*values.tolist())
    if not all(map(isfinite, found)) or min(found.count, found.mean, found.variance, found.z_variance) < 0:
        raise InputError(f"the checkpoint's history of a part's norms is none: {found}")
    return found


def _moved(mean: float, variance: float, value: float) -> tuple[float, float]:
    delta = value - mean
    return mean + ALPHA * delta, (1 - ALPHA) * (variance + ALPHA * delta * delta)
