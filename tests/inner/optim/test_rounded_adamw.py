"""Moments in bf16 are rounded stochastically, by bits that are equal on every mesh."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from inner.checkpoint.save_load import Checkpoints
from inner.checkpoint.state import live_tensors
from inner.config import OptimizerConfig
from inner.errors import InputError
from inner.mesh import Degrees
from inner.optim.rounded_adamw import MOMENTS, RoundedAdamW, round_stochastically, row_keys
from inner.param_spec import ParamSlice
from inner.params import local_tensor
from inner.trainer import Trainer
from tests.harness import run_ranks
from tests.inner.small import OPTIMIZER, batch, build_trainer, relative_error, share
from tests.parity.meshes import GROUPED, MIXTURE, Case, Key, case, put_together

IN_BF16 = OPTIMIZER.model_copy(update={"state_dtype": "bfloat16"})
STEPS = 3
CASES = [
    case("dp_shard2"),
    *(
        pytest.param(slow, marks=pytest.mark.slow)
        for slow in (
            case("dp_shard3", micro_batch=4),
            case("dp_replicate2"),
            case("tp2"),
            case("dp_shard2 tp2"),
            case("pp2"),
            case("cp2", zero=3),
            case("dp_shard2 ep2", MIXTURE),
        )
    ),
]


@pytest.mark.parametrize(
    ("value", "draw", "expected"),
    [
        (0x3F800000, 0xFFFF, 0x3F80),
        (0x3F800001, 0xFFFE, 0x3F80),
        (0x3F800001, 0xFFFF, 0x3F81),
        (0x3F808000, 0x7FFF, 0x3F80),
        (0x3F808000, 0x8000, 0x3F81),
        (0xBF80FFFF, 0x0001, 0xBF81),
        (0xBF80FFFF, 0x0000, 0xBF80),
        (0x3FFFFFFF, 0x0001, 0x4000),
    ],
)
def test_bits_and_draw_decide_which_neighbour_is_taken(
    value: int, draw: int, expected: int
) -> None:
    exact = torch.tensor([value], dtype=torch.int64).to(torch.int32).view(torch.float32)
    draws = torch.tensor([draw], dtype=torch.int64).to(torch.int16)
    assert int(round_stochastically(exact, draws).view(torch.int16)) & 0xFFFF == expected


def test_steps_rows_names_and_moments_have_other_keys() -> None:
    held = ParamSlice("a", (0, 4), (0, 8))
    keys = [
        row_keys(name, held, torch.tensor(float(step)))
        for name in ("7/a/m", "7/b/m", "7/a/v")
        for step in (1, 2)
    ]
    assert len(set(torch.cat(keys).tolist())) == 4 * 3 * 2
    assert torch.equal(
        row_keys("7/a/m", ParamSlice("a", (2, 4), (0, 8)), torch.tensor(1.0)), keys[0][2:]
    )


def gradient(name: str, shape: tuple[int, int], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + sum(name.encode()))
    return torch.randn(shape, generator=generator)


def step_with_drawn_gradients(trainer: Trainer, step: int) -> None:
    """A step of the optimizer on gradients that are equal on every mesh, which summed ones are not
    to the last bit.
    """
    params = trainer.params
    shapes = {spec.name: spec.matrix_shape for spec in params.specs}
    for index, held in enumerate(params.slices):
        whole = gradient(held.name, shapes[held.name], step)
        for param in params.copies(index):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            local = params.local_view(index, param.grad)
            local.copy_(whole[slice(*held.rows), slice(*held.cols)].reshape(local.shape))
    for optimizer in trainer.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def states(_: int, case: Case) -> dict[str, dict[str, Tensor]]:
    """The moments after a few steps, whole, by kind and parameter."""
    trainer = build_trainer(case.degrees, case.sizes, IN_BF16, case.parallel, **case.settings)
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, RoundedAdamW)
    for step in range(STEPS):
        step_with_drawn_gradients(trainer, step)
    found = {}
    for kind in MOMENTS:
        mine = []
        for index, held in enumerate(trainer.params.slices):
            state = optimizer.state[trainer.params.copies(index)[0]][kind]
            assert state.dtype == torch.bfloat16
            mine.append((held, trainer.params.local_view(index, state).reshape(held.shape).float()))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        found[kind] = put_together(trainer.params, everyone)
    return found


@cache
def of(key: Key) -> dict[str, dict[str, Tensor]]:
    return run_ranks(states, key.value.degrees.num_ranks, key.value)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_gradients_give_moments_of_equal_bits_on_every_mesh(case: Case) -> None:
    one, many = (of(Key(repr(each), each)) for each in (case.reference, case))
    for kind in MOMENTS:
        assert {
            name: bool(many[kind][name].equal(values)) for name, values in one[kind].items()
        } == dict.fromkeys(one[kind], True)


def losses_and_moments(_: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses with moments in bf16; the first moments after a step on drawn gradients in bf16, and
    in fp32.
    """
    trainer = build_trainer(case("pp1").degrees, GROUPED, IN_BF16)
    losses = [trainer.step(share(trainer, batch(step))).loss or 0.0 for step in range(6)]
    moments = []
    for config in (IN_BF16, OPTIMIZER):
        trainer = build_trainer(case("pp1").degrees, GROUPED, config)
        step_with_drawn_gradients(trainer, 0)
        (optimizer,) = trainer.optimizers
        named = trainer.model_parts[0].named_parameters()
        moments.append({name: optimizer.state[param]["exp_avg"].float() for name, param in named})
    return losses, *moments


def test_moments_are_those_of_fp32_within_a_bit_of_bf16_and_the_model_learns() -> None:
    losses, rounded, exact = run_ranks(losses_and_moments, 1)[0]
    assert losses[-1] < losses[0]
    for name, values in exact.items():
        assert relative_error(rounded[name], values) < 2**-7, name
        assert not rounded[name].equal(values)


def test_bf16_states_with_another_optimizer_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"state_dtype bfloat16 is for adamw alone, and name is muon"
    ):
        OptimizerConfig(name="muon", state_dtype="bfloat16")


def gone_on(rank: int, folder: Path) -> tuple[bool, str]:
    """Whether a loaded trainer goes on with the bits of the saved one; what one with moments in
    fp32 says to it.
    """
    trainers = [
        build_trainer(Degrees(dp_shard=2), GROUPED, config)
        for config in (IN_BF16, IN_BF16, OPTIMIZER)
    ]
    saved, loaded, exact = trainers
    saved.step(share(saved, batch(0)))
    checkpoints = Checkpoints(folder, keep=2, timeout_seconds=60)
    checkpoints.save(saved, {})
    checkpoints.wait(60)
    found = checkpoints.newest()
    assert found is not None
    checkpoints.load(loaded, found)
    for trainer in (saved, loaded):
        trainer.step(share(trainer, batch(1)))
    tensors = [live_tensors(trainer.model_parts, trainer.optimizers) for trainer in (saved, loaded)]
    pairs = [
        (local_tensor(tensors[0][name][0]), local_tensor(tensors[1][name][0]))
        for name in tensors[0]
    ]
    try:
        checkpoints.load(exact, found)
        refusal = ""
    except InputError as error:
        refusal = str(error)
    checkpoints.close()
    return all(torch.equal(*pair) for pair in pairs), refusal


def test_a_checkpoint_keeps_the_moments_and_the_bits_that_follow(tmp_path: Path) -> None:
    for is_equal, refusal in run_ranks(gone_on, 2, tmp_path):
        assert is_equal
        assert "is stepped by AdamW here, but by RoundedAdamW in the checkpoint" in refusal
