"""Learning rates against their closed forms, and which parameters decay."""

import math

import pytest

from inner.config import OptimizerConfig
from inner.model import Transformer
from inner.optim import build_optimizer, lr_at
from tests.inner.small import SIZES


def lrs(total_steps: int, **config: object) -> list[float]:
    settings = OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps": 2, "min_lr_ratio": 0.0} | config)
    return [lr_at(step, total_steps, settings) for step in range(total_steps + 2)]


def test_constant_warms_up_and_stays() -> None:
    assert lrs(4, schedule="constant") == [0.5, 1, 1, 1, 1, 1]


def test_cosine_ends_at_the_least_on_the_last_step() -> None:
    expected = [0.5, 1] + [(1 + math.cos(math.pi * part)) / 2 for part in (0.25, 0.5, 0.75, 1, 1, 1)]
    assert lrs(6, schedule="cosine") == pytest.approx(expected, abs=1e-15)


def test_cosine_keeps_its_floor() -> None:
    assert lrs(6, schedule="cosine", min_lr_ratio=0.1)[5:] == pytest.approx([0.1, 0.1, 0.1])


def test_wsd_decays_linearly_over_its_last_steps() -> None:
    expected = [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    assert lrs(8, schedule="wsd", decay_steps=4) == pytest.approx(expected)


def test_wsd_without_decay_steps_stays() -> None:
    assert lrs(4, schedule="wsd") == [0.5, 1, 1, 1, 1, 1]


def test_warm_up_longer_than_the_run_never_peaks() -> None:
    assert lrs(3, schedule="cosine", warmup_steps=10)[:3] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_matrices_but_the_embedding_decay(name: str) -> None:
    model = Transformer(SIZES)
    names = {id(param): name for name, param in model.named_parameters()}
    config = OptimizerConfig.model_validate({"name": name, "weight_decay": 0.3})
    groups = build_optimizer(model, config).param_groups
    decays = {names[id(param)]: group["weight_decay"] for group in groups for param in group["params"]}
    assert len(decays) == len(names)
    for param_name, decay in decays.items():
        is_matrix = not param_name.endswith("norm.weight") and param_name != "embed.weight"
        assert decay == (0.3 if is_matrix else 0.0), param_name
