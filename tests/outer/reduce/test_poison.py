"""One of eight islands gives the others its pseudo-gradient turned around and ten times as long, in
every round.

The model is a softmax regression, the islands' data are their own draws of one noisy problem: what
they have in common is learnt by all, and the loss that remains is that of the noise.
"""

from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy

from outer.config import MergeConfig, OuterConfig, OuterOptimizerConfig
from outer.hooks import Hooks, NoHooks
from tests.outer.islands import GUARD_SECONDS, Island, run_islands

torch.set_num_threads(1)

NAMES = [f"island-{index}" for index in range(8)]
POISONER = "island-3"
ROUNDS, INNER_STEPS, BATCH = 8, 4, 32
FEATURES, CLASSES = 40, 8
UNTRAINED = torch.tensor(float(CLASSES)).log().item()


class Poison(NoHooks):
    """The hooks that `diloco simulate --fault poison` gives to an island."""

    def pseudo_grad(self, round_number: int, values: torch.Tensor) -> torch.Tensor:
        return values * -10.0


def model() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(CLASSES, FEATURES)}


def draw(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, and classes drawn with the probabilities that the true weights give."""
    truth = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0)) * 0.5
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, FEATURES, generator=generator)
    return features, torch.multinomial((features @ truth.T).softmax(1), 1, generator=generator)[
        :, 0
    ]


def train(island: Island) -> float:
    """The held-out loss after all rounds."""
    island.outer.begin()
    (weight,) = island.params.values
    for round_number in range(ROUNDS):
        for step in range(INNER_STEPS):
            number = (NAMES.index(island.name) * ROUNDS + round_number) * INNER_STEPS + step
            features, classes = draw(1 + number, BATCH)
            leaf = weight.clone().requires_grad_()
            cross_entropy(features @ leaf.T, classes).backward()
            assert leaf.grad is not None
            weight.sub_(leaf.grad)
        island.commit()
    features, classes = draw(10**6, 4096)
    return cross_entropy(features @ weight.T, classes).item()


@cache
def loss(rule: str, *, is_poisoned: bool) -> float:
    """The held-out loss that all islands end with."""
    config = OuterConfig(
        optimizer=OuterOptimizerConfig(lr=0.7, momentum=0.5),
        merge=MergeConfig(rule=rule),  # type: ignore[arg-type]
        # Two parts, by the codec's blocks; other codecs would cut so small a model into sixteen.
        codec="int8",
        transport="loopback",
        start_islands=len(NAMES),
        wait_seconds=GUARD_SECONDS,
    )
    hooks: dict[str, Hooks] = {POISONER: Poison()} if is_poisoned else {}
    losses = run_islands(dict.fromkeys(NAMES, train), config, model=model, hooks=hooks)
    assert len(set(losses.values())) == 1, "the islands hold the same bits"
    return losses[NAMES[0]]


def test_the_mean_learns_without_a_poisoner() -> None:
    assert loss("mean", is_poisoned=False) < 0.8 * UNTRAINED


def test_the_mean_diverges_with_a_poisoner() -> None:
    assert not loss("mean", is_poisoned=True) < UNTRAINED


@pytest.mark.parametrize("rule", ["trimmed_mean", "geometric_median", "centered_clip"])
def test_robust_rules_learn_with_a_poisoner(rule: str) -> None:
    assert loss(rule, is_poisoned=True) < 1.1 * loss("mean", is_poisoned=False)


@pytest.mark.parametrize("rule", ["trimmed_mean", "geometric_median", "centered_clip"])
def test_robust_rules_cost_at_most_one_percent_without_a_poisoner(rule: str) -> None:
    assert loss(rule, is_poisoned=False) < 1.01 * loss("mean", is_poisoned=False)
