"""Delayed Nesterov (2401.09135): the same step as all at once, and islands of unequal speed that do
not wait.
"""

import heapq
from dataclasses import dataclass

import pytest
import torch

from outer.config import OuterConfig, OuterOptimizerConfig
from outer.state.optimizer import OuterOptimizer

NESTEROV = OuterOptimizerConfig(lr=0.7, momentum=0.9)
DELAYED = OuterOptimizerConfig(lr=0.7, momentum=0.9, delayed=True)


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(count)]


def start() -> torch.Tensor:
    return torch.ones(50, dtype=torch.float64)


@pytest.mark.parametrize("num_islands", [1, 2, 4, 7])
def test_as_many_pushes_as_islands_make_the_step_of_nesterov_on_their_mean(
    num_islands: int,
) -> None:
    at_once, one_by_one = start(), start()
    together = OuterOptimizer({0: at_once}, NESTEROV)
    apart = OuterOptimizer({0: one_by_one}, DELAYED, num_islands)
    grads = gradients(5 * num_islands)
    for cycle in range(5):
        of_cycle = grads[cycle * num_islands : (cycle + 1) * num_islands]
        together.step({0: torch.stack(of_cycle).mean(0)})
        for grad in of_cycle:
            apart.step({0: grad})
        torch.testing.assert_close(one_by_one, at_once, rtol=0, atol=1e-12)


def test_a_mean_of_several_counts_as_their_pushes() -> None:
    one_by_one, in_groups = start(), start()
    single = OuterOptimizer({0: one_by_one}, DELAYED, 4)
    grouped = OuterOptimizer({0: in_groups}, DELAYED, 4)
    grads = gradients(8)
    for first, last in ((0, 3), (3, 4), (4, 6), (6, 8)):
        for grad in grads[first:last]:
            single.step({0: grad})
        grouped.step({0: torch.stack(grads[first:last]).mean(0)}, last - first)
    torch.testing.assert_close(in_groups, one_by_one, rtol=0, atol=1e-12)
    assert single.pushes(0) == grouped.pushes(0) == 0


def test_each_part_counts_its_own_pushes() -> None:
    optimizer = OuterOptimizer({0: start(), 1: start()}, DELAYED, 4)
    (grad,) = gradients(1)
    optimizer.step({0: grad}, 3)
    optimizer.step({1: grad}, 2)
    assert (optimizer.pushes(0), optimizer.pushes(1)) == (3, 2)


@pytest.mark.parametrize("num_islands,coefficient", [(1, 1.9), (4, 12.144)])
def test_nesterov_at_each_push_takes_equal_gradients_many_times(
    num_islands: int, coefficient: float
) -> None:
    # Why it is delayed: 4 + 4 b + 3 b^2 + 2 b^3 + b^4 for four islands.
    values = torch.zeros(1, dtype=torch.float64)
    optimizer = OuterOptimizer({0: values}, OuterOptimizerConfig(lr=1.0, momentum=0.9))
    for _ in range(num_islands):
        optimizer.step({0: torch.ones(1, dtype=torch.float64)})
    assert -values.item() == pytest.approx(coefficient, abs=5e-4)


@pytest.mark.parametrize("values", [{"momentum": 0.0}, {"nesterov": False}], ids=str)
def test_delayed_without_nesterov_momentum_is_refused(values: dict) -> None:
    with pytest.raises(ValueError, match="set momentum above 0 and nesterov to true"):
        OuterOptimizerConfig(delayed=True, **values)


def test_eager_updates_are_not_delayed() -> None:
    with pytest.raises(ValueError, match="eager"):
        OuterConfig(eager=True, delay=3, optimizer=DELAYED)


# -- a toy with islands of unequal speed -----------------------------------------------------------

SPEEDS = (40, 37, 33, 10)
"""Inner steps in a unit of time."""
INNER_STEPS = 20
CURVATURE = torch.logspace(-1.5, 0.0, 30, dtype=torch.float64)
NOISE = torch.Generator()


def loss(params: torch.Tensor) -> float:
    """Over the best there is. All islands have data of one kind; what they see of it is noise."""
    return float((CURVATURE * params.square()).sum() / 2)


def progress(params: torch.Tensor, steps: int) -> torch.Tensor:
    """The pseudo-gradient of so many noisy inner steps."""
    local = params.clone()
    for _ in range(steps):
        noise = torch.randn(30, generator=NOISE, dtype=torch.float64)
        local -= 0.1 * (CURVATURE * local + 0.3 * noise)
    return params - local


@dataclass(frozen=True)
class Race:
    """How islands that do not wait for all go about it."""

    config: OuterOptimizerConfig
    is_dynamic: bool
    """Whether slow islands make fewer inner steps."""
    grace: float
    """For so long the first to come waits for others."""

    def steps(self, island: int) -> int:
        return INNER_STEPS * SPEEDS[island] // max(SPEEDS) if self.is_dynamic else INNER_STEPS


def raced(race: Race, total_steps: int) -> float:
    """The loss when progress goes in as it comes, from the params that each island began with."""
    params = torch.full((30,), 5.0, dtype=torch.float64)
    optimizer = OuterOptimizer({0: params}, race.config, len(SPEEDS))
    NOISE.manual_seed(0)
    grads = {i: progress(params, race.steps(i)) for i in range(len(SPEEDS))}
    due = [(race.steps(i) / SPEEDS[i], i) for i in grads]
    heapq.heapify(due)
    made = 0
    while made < total_steps:
        first, come = due[0][0], []
        while due and due[0][0] <= first + race.grace:
            now, island = heapq.heappop(due)
            come.append(island)
        steps = sum(race.steps(i) for i in come)
        optimizer.step({0: sum(grads[i] * (race.steps(i) / steps) for i in come)}, len(come))
        made += steps
        for island in come:
            grads[island] = progress(params, race.steps(island))
            heapq.heappush(due, (now + race.steps(island) / SPEEDS[island], island))
    return loss(params)


def synchronous(total_steps: int) -> float:
    """The loss when all wait for all."""
    params = torch.full((30,), 5.0, dtype=torch.float64)
    optimizer = OuterOptimizer({0: params}, NESTEROV)
    NOISE.manual_seed(0)
    for _ in range(total_steps // (len(SPEEDS) * INNER_STEPS)):
        grads = [progress(params, INNER_STEPS) for _ in SPEEDS]
        optimizer.step({0: torch.stack(grads).mean(0)})
    return loss(params)


def test_at_unequal_speeds_it_is_as_good_as_waiting_and_nesterov_at_each_push_is_not() -> None:
    total_steps = 30 * len(SPEEDS) * INNER_STEPS
    waiting = synchronous(total_steps)
    for grace, most in ((0.0, 1.3), (0.05, 1.0)):
        delayed = raced(Race(DELAYED, is_dynamic=True, grace=grace), total_steps)
        assert delayed < most * waiting, (grace, waiting, delayed)
    for lr in (0.7, 0.07):
        naive = raced(
            Race(NESTEROV.model_copy(update={"lr": lr}), is_dynamic=False, grace=0.0), total_steps
        )
        assert naive > 10 * waiting, (lr, waiting, naive)
