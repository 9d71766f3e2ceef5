"""An own optimizer trains alike on every mesh, resumes on another, and is refused before a run
where it could not.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from inner.checkpoint.save_load import Checkpoints
from inner.config import OptimizerConfig
from inner.errors import InputError
from inner.mesh import Degrees
from inner.optim.own_optimizer import check_own_optimizer
from inner.optim.state_bytes import StateBytes, find_state_bytes
from inner.trainer import Trainer
from tests.harness import run_ranks
from tests.inner.small import (
    OPTIMIZER,
    SEQUENCES,
    batch,
    build_trainer,
    relative_error,
    share,
    whole_model,
)

OWN = "tests.own.optimizers"
SHARDED = Degrees(dp_shard=2)
MESHES = {
    "one": Degrees(),
    "dp_shard2": SHARDED,
    "tp2": Degrees(tp=2),
    "pp2": Degrees(pp=2),
}
STEPS = 6
SAVED_AFTER = 3


def config(name: str, **options: float) -> OptimizerConfig:
    values = OPTIMIZER.model_dump() | {"name": f"{OWN}:{name}", "options": options}
    return OptimizerConfig.model_validate(values)


def build(name: str, degrees: Degrees) -> Trainer:
    micro_batch = SEQUENCES // degrees.num_data_ranks // degrees.pp
    return build_trainer(degrees, config=config(name), micro_batch=micro_batch)


def live(_: int, name: str, degrees: Degrees, folder: Path) -> list[dict[str, Tensor]]:
    """The model before and after some steps, and after a checkpoint of one process is loaded and
    trained on.
    """
    trainer = build(name, degrees)
    models = [whole_model(trainer.params)[0]]
    checkpoints = Checkpoints(folder, keep=2, timeout_seconds=60)
    for step in range(STEPS):
        trainer.step(share(trainer, batch(step)))
        if step + 1 == SAVED_AFTER and degrees == Degrees():
            checkpoints.save(trainer, {})
            checkpoints.wait(60)
    models.append(whole_model(trainer.params)[0])
    resumed, found = build(name, degrees), checkpoints.newest()
    assert found is not None
    checkpoints.load(resumed, found)
    for step in range(SAVED_AFTER, STEPS):
        resumed.step(share(resumed, batch(step)))
    checkpoints.close()
    return [*models, whole_model(resumed.params)[0]]


Lives = dict[str, list[dict[str, Tensor]]]


@pytest.fixture(scope="module", params=["Lion", "UnitStepOfShards"])
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lives:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        name: run_ranks(live, degrees.num_ranks, request.param, degrees, folder)[0]
        for name, degrees in MESHES.items()
    }


@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_trains_and_resumes_like_one_process(lives: Lives, name: str) -> None:
    first, expected, _ = lives["one"]
    for got in lives[name][1:]:
        for param, value in expected.items():
            assert relative_error(got[param] - first[param], value - first[param]) < 1e-3, param


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Lyon", {}, r"the nearest name is tests\.own\.optimizers:Lion"),
        ("Tensor", {}, "allowed: a class or function that tests defines"),
        ("not_a_class", {}, r"not a subclass of torch\.optim\.Optimizer"),
        (
            "Lion",
            {"beta3": 0.9},
            r"Lion\(params.*beta2.*called with groups, lr, beta3 it raised TypeError.*options",
        ),
        ("OwnRate", {}, r"moves parameters when group\['lr'\] is 0"),
        ("CountsInGroups", {}, r"changes \['steps'\] of its groups"),
        ("CountsInState", {}, r"keeps state\[param\]\['steps'\] as int .* allowed: tensors"),
    ],
)
def test_an_optimizer_that_breaks_the_contract_is_refused(
    name: str, options: dict[str, float], why: str
) -> None:
    with pytest.raises(InputError, match=f"^optimizer.name: .*{why}"):
        check_own_optimizer(config(name, **options), Degrees())


@pytest.mark.parametrize("degrees", [SHARDED, Degrees(tp=2), Degrees(cp=2)], ids=str)
def test_one_that_is_not_elementwise_is_refused_on_shards_unless_it_handles_them(
    degrees: Degrees,
) -> None:
    with pytest.raises(InputError, match=r"shards; .* set handles_shards = True"):
        check_own_optimizer(config("UnitStep"), degrees)
    check_own_optimizer(config("UnitStep"), Degrees(pp=2, dp_replicate=2))
    check_own_optimizer(config("UnitStepOfShards"), degrees)
    check_own_optimizer(config("Lion"), degrees)


def test_what_it_keeps_is_measured() -> None:
    assert find_state_bytes(config("Lion")) == StateBytes(4, 4)
    assert find_state_bytes(config("UnitStep")) == StateBytes(0, 0)


def test_an_optimizer_of_torch_that_is_none_of_ours_is_one_by_import_path() -> None:
    values = OPTIMIZER.model_dump() | {
        "name": "torch.optim:RMSprop",
        "options": {"momentum": 0.9, "eps": "1e-7"},
    }
    rmsprop = OptimizerConfig.model_validate(values)
    check_own_optimizer(rmsprop, SHARDED)
    assert find_state_bytes(rmsprop) == StateBytes(8, 8) and rmsprop.options["eps"] == 1e-7


def test_a_group_may_leave_parameters_to_adamw() -> None:
    values = config("UnitStep").model_dump() | {
        "groups": [{"pattern": "norm|embed", "optimizer": "adamw"}]
    }
    [trainer] = run_ranks(kinds, 1, OptimizerConfig.model_validate(values))
    assert trainer == ["UnitStep", "AdamW"]


def kinds(_: int, config: OptimizerConfig) -> list[str]:
    torch.manual_seed(0)
    return [
        type(optimizer).__name__ for optimizer in build_trainer(Degrees(), config=config).optimizers
    ]
