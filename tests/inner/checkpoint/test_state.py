"""Any optimizer's state is loaded into one that has none or another; another model's is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inner.errors import InputError
from tests.harness import run_ranks
from tests.inner.checkpoint_crash import open_checkpoints

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw_amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd_momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "muon": lambda params: torch.optim.Muon(params, lr=0.01),
}


@dataclass
class Plain:
    """A training state with any optimizer: two matrices that need not be sharded."""

    model_parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    inner_step: int = 0

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.inner_step)
        model, optimizer = self.model_parts[0], self.optimizers[0]
        model(torch.randn(3, 8, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        self.inner_step += 1

    @property
    def values(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model_parts[0].parameters()]


def plain(optimizer: str, seed: int, width: int = 8, depth: int = 2) -> Plain:
    torch.manual_seed(seed)
    model = nn.Sequential(
        *[nn.Linear(8, 8, bias=False) for _ in range(depth - 1)], nn.Linear(8, width, bias=False)
    )
    return Plain([model], [OPTIMIZERS[optimizer](list(model.parameters()))])


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str, steps_before: int) -> None:
    (expected, got) = run_ranks(optimizer_on_a_rank, 1, tmp_path, name, steps_before)[0]
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


def optimizer_on_a_rank(
    rank: int, folder: Path, name: str, steps_before: int
) -> list[list[Tensor]]:
    first, second = plain(name, seed=1), plain(name, seed=2)
    for _ in range(steps_before):
        first.step()
    # States of its previous history must be dropped even where none were saved.
    second.step()
    checkpoints = open_checkpoints(folder)
    checkpoints.save(first, {}, wait=True)
    checkpoints.load(second, checkpoints.at(steps_before))
    for _ in range(3):
        first.step()
        second.step()
    return [first.values, second.values]


# Mismatches: the rank that has another model or optimizer (None: all ranks), and the error on every
# rank.

MISFITS: dict[str, tuple[int | None, dict[str, Any], str]] = {
    "shape": (
        1,
        {"width": 5},
        "1.weight is (5, 8) torch.float32 in the model, (8, 8) torch.float32 in the checkpoint",
    ),
    "deeper": (1, {"depth": 3}, "the model has the parameter 2.weight, the checkpoint does not"),
    "shallower": (
        None,
        {"depth": 1},
        "the checkpoint has the parameter 1.weight, the model does not",
    ),
    "optimizer": (
        1,
        {"optimizer": "sgd"},
        "0.weight is stepped by SGD here, but by AdamW in the checkpoint",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_other_model_or_optimizer_is_refused_and_stays_as_it_was(tmp_path: Path, name: str) -> None:
    which, changes, text = MISFITS[name]
    for error, is_unchanged in run_ranks(misfit_on_a_rank, 2, tmp_path, which, changes):
        assert text in error
        assert str(tmp_path / "step-00000001") in error
        assert is_unchanged


def misfit_on_a_rank(
    rank: int, folder: Path, which: int | None, changes: dict[str, Any]
) -> tuple[str, bool]:
    checkpoints = open_checkpoints(folder)
    first = plain("adamw_fused", seed=1)
    first.step()
    checkpoints.save(first, {}, wait=True)
    other = plain(
        **{"optimizer": "adamw_fused", "seed": 2} | (changes if which in (rank, None) else {})
    )
    before = other.values
    with pytest.raises(InputError) as error:
        checkpoints.load(other, checkpoints.at(1))
    is_unchanged = all(map(torch.equal, other.values, before)) and other.inner_step == 0
    return str(error.value), is_unchanged


def test_facts_must_be_json(tmp_path: Path) -> None:
    for error in run_ranks(bad_facts_on_a_rank, 2, tmp_path):
        assert "not JSON serializable" in error


def bad_facts_on_a_rank(rank: int, folder: Path) -> str:
    with pytest.raises(TypeError) as error:
        open_checkpoints(folder).save(plain("sgd", seed=1), {"folder": folder})
    return str(error.value)
