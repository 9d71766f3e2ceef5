"""An outer optimizer of the user's own, and the tests that it must pass before a run begins with
it.
"""

from typing import Protocol

import torch

from outer.config.own_code import Options
from outer.own_code import call, once, require

KEY = "outer.optimizer.rule"
STRETCH = 64
SIZE = 4 * STRETCH + 7


class OuterRule(Protocol):
    """The interface of own code: a step of some elements of the global params, each
    independently.
    """

    def step(
        self, params: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor, lr: float
    ) -> None:
        """Step `params` and `momentum` in place. All are 1-D fp32 on the CPU; `momentum` begins as
        zeros.

        `mean` is the mean pseudo-gradient: old minus new params, so that params - lr mean goes
        where the islands went.
        """
        ...


@once
def build_own_rule(path: str, options: Options) -> OuterRule:
    """Build the outer optimizer that an import path names and test it. Raises InputError."""
    rule = call(path, KEY, options)
    check_outer_rule(rule, path)
    return rule


def check_outer_rule(rule: OuterRule, name: str = "the rule") -> None:
    """Test what every outer optimizer must do. Raises InputError with the first requirement that
    does not hold.
    """
    require(CLAIMS, rule, f"{KEY}: {name}")


def _stepped(rule: OuterRule, stretch: int) -> torch.Tensor:
    """Return params and momentum, stacked, after two steps that are made stretch by stretch."""
    number = torch.arange(SIZE, dtype=torch.float32)
    params = torch.cos(number)
    momentum = torch.zeros(SIZE)
    mean = torch.sin(number * 3) * 0.01
    for _ in range(2):
        for begin in range(0, SIZE, stretch):
            cut = slice(begin, begin + stretch)
            rule.step(params[cut], momentum[cut], mean[cut], 0.7)
    return torch.stack([params, momentum])


def gives_equal_bits(rule: OuterRule) -> bool:
    """Equal steps give equal bits: nothing is kept outside of `momentum`."""
    return torch.equal(_stepped(rule, SIZE), _stepped(rule, SIZE))


def steps_elements_alone(rule: OuterRule) -> bool:
    """A part has the same bits however it is cut into stretches of 64 elements: each
    element is stepped by itself.
    """
    return torch.equal(_stepped(rule, SIZE), _stepped(rule, STRETCH))


def stays_finite(rule: OuterRule) -> bool:
    """Finite values stay finite."""
    return bool(_stepped(rule, SIZE).isfinite().all())


def leaves_the_mean_alone(rule: OuterRule) -> bool:
    """The mean is not changed."""
    mean = torch.ones(STRETCH)
    rule.step(torch.zeros(STRETCH), torch.zeros(STRETCH), mean, 0.7)
    return torch.equal(mean, torch.ones(STRETCH))


CLAIMS = (gives_equal_bits, steps_elements_alone, stays_finite, leaves_the_mean_alone)
