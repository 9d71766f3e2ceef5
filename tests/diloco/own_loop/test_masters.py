"""fp32 masters of parameters in bfloat16: those that Islands keeps, and those of the loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.model.masters import KeptMasters, Masters, follow
from diloco.own_loop.model.params import find_params
from inner.params import LocalParams
from tests.diloco.own_loop.loops import TOKENS, finish, own_config, small_model
from tests.swarm import swarm

ALONE = {"outer": {"transport": "loopback", "rounds": 2, "inner_steps": 1, "start_islands": 1}}


def alone(folder: Path, **island: Any) -> dict[str, Any]:
    return ALONE | {"island": {"run_dir": str(folder)} | island}


def kept(param: nn.Parameter) -> KeptMasters:
    """The masters that Islands keeps of one parameter."""
    found = find_params(nn.ParameterDict({"w": param}), keeps_masters=True)
    params = LocalParams.of_tensors({"w": tuple(param.shape)}, found.trained)
    return KeptMasters(params, [[param]])


def test_a_master_is_read_back_exactly_until_the_model_is_trained() -> None:
    param = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    masters, values = kept(param), torch.randn(1000, 1)
    masters.write_all({0: values})
    assert torch.equal(param.detach(), values.flatten().bfloat16())
    for _ in range(2):
        assert torch.equal(masters.read_all([0])[0], values)
    assert masters.live(0) is None, "the model would not get the values"


def test_what_the_loop_has_trained_is_read_and_rounds_to_the_models_values() -> None:
    param = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    masters, values = kept(param), torch.randn(1000, 1)
    masters.write_all({0: values})
    with torch.no_grad():
        param *= torch.rand(1000)
        trained = param.clone()
    read = masters.read_all([0])[0].clone()
    assert torch.equal(read.flatten().bfloat16(), trained)
    assert not torch.equal(read.flatten(), trained.float()), "what rounding cut off is kept"
    masters.write_all({0: read})
    assert torch.equal(param.detach(), trained), "an evaluation does not change the model"


def test_a_master_follows_a_value_that_is_not_finite() -> None:
    master, model = torch.ones(2), torch.tensor([torch.nan, 2.0], dtype=torch.bfloat16)
    follow(master, model)
    assert master[0].isnan() and master[1] == 2.0


def train_half(config: Config, index: int) -> tuple[dict[str, torch.Tensor], str]:
    """Two islands in bfloat16. Island 0 has masters of Islands; island 1 steps masters of its
    own.
    """
    model = small_model().bfloat16()
    if index == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        islands = Islands(own_config(config, index, {"masters": True}), model, optimizer)
        for unit in islands.units():
            loss = model(torch.ones(TOKENS, 4, dtype=torch.bfloat16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            islands.step(tokens=TOKENS, loss=loss.detach() + unit)
        return model.state_dict(), islands.digest
    full = small_model()
    full.load_state_dict(model.state_dict())

    def copy() -> None:
        model.load_state_dict(full.state_dict())

    optimizer = torch.optim.SGD(full.parameters(), lr=1e-2)
    masters = diloco.Masters(dict(full.named_parameters()), copy)
    islands = Islands(own_config(config, index), model, optimizer, params=masters)
    finish(islands, full, optimizer)
    return model.state_dict(), islands.digest


def test_islands_with_masters_of_their_own_and_of_islands_end_with_one_model(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, islands=[{}, {}]) as made:
        for island in made.start_all(train_half):
            island.finish()
        (first, digest), (second, same) = (island.result() for island in made.started)
    assert digest == same
    assert all(torch.equal(values, second[name]) for name, values in first.items())
    before = small_model().bfloat16().state_dict()
    assert not any(torch.equal(values, before[name]) for name, values in first.items())


def test_an_evaluation_and_rounds_of_one_island_leave_what_it_trained(tmp_path: Path) -> None:
    model = small_model().bfloat16()
    config = alone(tmp_path, masters=True) | {
        "outer": ALONE["outer"] | {"optimizer": {"lr": 1.0, "momentum": 0.0}}
    }
    with Islands(config, model) as islands:
        while not islands.is_over:
            with torch.no_grad():
                for param in model.parameters():
                    param *= 0.9
            trained = {name: value.clone() for name, value in model.state_dict().items()}
            with islands.global_params():
                pass
            assert all(
                torch.equal(value, trained[name]) for name, value in model.state_dict().items()
            )
            islands.step(tokens=1)
            found = model.state_dict()
            assert all(
                torch.allclose(found[name], value, rtol=1e-2) for name, value in trained.items()
            )


def full_masters(model: nn.Module, **changes: Any) -> Masters:
    masters = {name: param.detach().float() for name, param in model.named_parameters()}
    return Masters(
        {name: value for name, value in (masters | changes).items() if value is not None},
        lambda: None,
    )


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"weight": None}, r"'weight' is bfloat16.* give fp32 masters .* island\.masters=true"),
        (
            {"other": torch.zeros(2)},
            "the master 'other' is of no parameter that requires a gradient",
        ),
        ({"weight": torch.zeros(2, 2).bfloat16()}, "the master 'weight' is bfloat16 on cpu"),
        (
            {"weight": torch.zeros(2, 3)},
            r"the master 'weight' has the shape \(2, 3\), the parameter \(2, 2\)",
        ),
    ],
    ids=["missing", "unknown", "bfloat16", "shape"],
)
def test_masters_that_do_not_cover_the_parameters_are_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(ConfigError, match=text):
        Islands(alone(tmp_path), model, params=full_masters(model, **changes))


def test_masters_of_two_kinds_and_moments_of_bfloat16_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(ConfigError, match="params: masters are given"):
        Islands(alone(tmp_path, masters=True), model, params=full_masters(model))
    config = alone(tmp_path, masters=True) | {"outer": ALONE["outer"] | {"moments": [1, 1]}}
    with pytest.raises(
        ConfigError,
        match=r"outer\.moments: with island\.masters the optimizer's moments are not fp32",
    ):
        Islands(config, model, torch.optim.AdamW(model.parameters()))
