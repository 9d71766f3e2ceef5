"""The trainer: accumulation, precision, skipped steps, evaluation, reruns, writes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from inner.config import ParallelConfig
from inner.errors import InputError, TrainingStopped
from inner.mesh import Degrees
from inner.trainer import StepResult, Trainer
from tests.harness import run_ranks
from tests.inner.small import (
    OPTIMIZER,
    SIZES,
    batch,
    build_trainer,
    relative_error,
    share,
    snapshot,
)

ONE, FSDP2, REPLICATE2 = Degrees(), Degrees(dp_shard=2), Degrees(dp_replicate=2)


def train(trainer: Trainer, num_steps: int) -> list[StepResult]:
    return [trainer.step(share(trainer, batch(step))) for step in range(num_steps)]


def assert_same_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


class CountOps(TorchDispatchMode):
    """Records the name of every operator called inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# Each function named `..._on_a_rank` runs on every rank of a group; several claims share one group.


def accumulation_on_a_rank(rank: int, degrees: Degrees, accumulate: str) -> dict[str, Any]:
    """The same steps with many micro-batches and with few, and the collectives of each."""
    found: dict[str, Any] = {"params": [], "losses": [], "reductions": []}
    # SGD: AdamW would blow up the rounding of elements whose gradient is nearly zero.
    config = OPTIMIZER.model_copy(update={"name": "sgd", "lr": 0.3})
    for micro_batch in (1, 6):
        parallel = ParallelConfig.model_validate({"accumulate": accumulate})
        trainer = build_trainer(degrees, config=config, parallel=parallel, micro_batch=micro_batch)
        train(trainer, 1)
        with CountOps() as ops:
            results = train(trainer, 4)
        found["reductions"].append(
            sum("c10d" in name and "reduce_scatter" in name for name in ops.names)
        )
        found["losses"].append([result.loss for result in results])
        found["params"].append(snapshot(trainer.params))
    return found


@pytest.fixture(scope="module")
def accumulated() -> dict[str, list[dict[str, Any]]]:
    return {how: run_ranks(accumulation_on_a_rank, 2, FSDP2, how) for how in ("sharded", "whole")}


@pytest.mark.parametrize("how", ["sharded", "whole"])
def test_many_small_micro_batches_equal_few_large_ones(
    accumulated: dict[str, list[dict[str, Any]]], how: str
) -> None:
    for found in accumulated[how]:
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
        errors = [relative_error(*pair) for pair in zip(*found["params"], strict=True)]
        assert max(errors) < 1e-6


@pytest.mark.parametrize(("how", "times"), [("sharded", 6), ("whole", 1)])
def test_gradients_cross_the_mesh_in_each_micro_batch_or_once(
    accumulated: dict[str, list[dict[str, Any]]], how: str, times: int
) -> None:
    for found in accumulated[how]:
        # The layers, the embedding, and norm and head. One step has six micro-batches, another one.
        num_units = SIZES.num_layers + 2
        assert found["reductions"] == [4 * num_units * times, 4 * num_units]


def precision_on_a_rank(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"dtypes": set(), "layer": set(), "rope": set()}
    trainer = build_trainer(FSDP2, compute_dtype="bfloat16")

    def note_layer(_: object, args: tuple[Tensor, ...], out: Tensor) -> None:
        found["layer"] |= {args[0].dtype, out.dtype}
        found["rope"] |= {args[1].dtype}

    trainer.model_parts[0].layers["1"].register_forward_hook(note_layer)
    trainer.model_parts[0].register_forward_hook(
        lambda _module, _args, out: found.update(loss=out.dtype)
    )

    def note_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            found["dtypes"] |= {param.dtype, param.grad.dtype}
            state = optimizer.state.get(param, {})
            found["dtypes"] |= {
                state[key].dtype for key in ("exp_avg", "exp_avg_sq") if key in state
            }

    register_optimizer_step_pre_hook(note_optimizer)
    found["bfloat16"] = [result.loss for result in train(trainer, 12)]
    found["float32"] = [result.loss for result in train(build_trainer(FSDP2), 12)]
    return found


@pytest.fixture(scope="module")
def precision() -> dict[str, Any]:
    return run_ranks(precision_on_a_rank, 2)[0]


def test_bfloat16_computes_in_bfloat16_with_fp32_rope_and_loss(precision: dict[str, Any]) -> None:
    assert precision["layer"] == {torch.bfloat16}
    assert precision["rope"] == {torch.float32}
    assert precision["loss"] == torch.float32


def test_bfloat16_keeps_params_gradients_and_moments_in_fp32(precision: dict[str, Any]) -> None:
    assert precision["dtypes"] == {torch.float32}


def test_bfloat16_trains_near_fp32(precision: dict[str, Any]) -> None:
    assert precision["bfloat16"] != precision["float32"]
    assert precision["bfloat16"] == pytest.approx(precision["float32"], rel=3e-3)


def poison_loss(trainer: Trainer) -> Any:
    """Make this rank's loss NaN from now on."""

    def hook(_module: object, _args: object, out: Tensor) -> Tensor:
        return out * math.nan

    return trainer.model_parts[0].register_forward_hook(hook)


def poison_gradient(trainer: Trainer) -> Any:
    """Make this rank's gradient non-finite from now on, with a finite loss."""

    def hook(_module: object, _args: object, out: Tensor) -> None:
        out.register_hook(lambda grad: grad * math.inf)

    return trainer.model_parts[0].register_forward_hook(hook)


def poisoned_on_a_rank(
    rank: int, degrees: Degrees, poison: Callable[[Trainer], Any]
) -> dict[str, Any]:
    """Two good steps, two poisoned on rank 1 only, a good one, then poisoned ones until the trainer
    stops.
    """
    config = OPTIMIZER.model_copy(update={"max_skipped_steps": 2})
    trainer = build_trainer(degrees, config=config)
    train(trainer, 2)
    before = snapshot(trainer.params)
    handle = poison(trainer) if rank == 1 else None
    found: dict[str, Any] = {"skipped": train(trainer, 2)}
    found["is_unchanged"] = all(map(torch.equal, before, snapshot(trainer.params)))
    if handle is not None:
        handle.remove()
    found["good"] = train(trainer, 1)[0]
    if rank == 1:
        poison(trainer)
    found["then"] = train(trainer, 2)
    try:
        train(trainer, 1)
    except TrainingStopped as stopped:
        found["reason"] = str(stopped)
    found["is_finite"] = all(bool(piece.isfinite().all()) for piece in snapshot(trainer.params))
    return found


@pytest.mark.parametrize(
    "degrees", [FSDP2, REPLICATE2, Degrees(tp=2), Degrees(cp=2), Degrees(pp=2)], ids=str
)
@pytest.mark.parametrize("poison", [poison_loss, poison_gradient])
def test_one_ranks_poison_is_skipped_by_all_and_stops_all_at_the_limit(
    degrees: Degrees, poison: Callable[[Trainer], Any]
) -> None:
    for found in run_ranks(poisoned_on_a_rank, 2, degrees, poison):
        assert [(step.is_skipped, step.loss, step.grad_norm) for step in found["skipped"]] == [
            (True, None, None)
        ] * 2
        assert [step.step for step in found["skipped"]] == [3, 4]
        assert found["is_unchanged"]
        # The good step resets the count: three in a row stop the island, not five in total.
        assert not found["good"].is_skipped
        assert [step.is_skipped for step in found["then"]] == [True, True]
        # Only rank 0 of a tensor-parallel group reports the loss.
        what = "loss" if poison is poison_loss and degrees.tp == 1 else "gradient"
        assert f"3 steps in a row had a non-finite {what}" in found["reason"]
        assert "optimizer.max_skipped_steps allows 2" in found["reason"]
        assert found["is_finite"]


def evaluation_on_a_rank(rank: int) -> None:
    """Evaluation between steps changes nothing, and a later write takes effect."""
    heldout = [batch(500)[:3], batch(501)[:3]]
    plain = build_trainer(FSDP2)
    watched = build_trainer(FSDP2)
    for step in range(4):
        plain.step(share(plain, batch(step)))
        random_state = torch.random.get_rng_state()
        watched.evaluate(heldout)
        assert torch.equal(torch.random.get_rng_state(), random_state)
        assert all(param.grad is None for param in watched.model_parts[0].parameters())
        watched.step(share(watched, batch(step)))
    assert_same_bits(snapshot(watched.params), snapshot(plain.params))
    assert watched.inner_step == plain.inner_step == 4

    # Ranks bring 2 and 0 windows; a forward that kept gathered weights would miss the zeroed head.
    before = watched.evaluate(heldout if rank == 0 else [])
    for index, held in enumerate(watched.params.slices):
        if held.name == "head.weight":
            watched.params.write(index, torch.zeros(held.shape))
    loss_sum, tokens = watched.evaluate(heldout if rank == 0 else [])
    assert before[1] == tokens == sum(int((window[:, 1:] >= 0).sum()) for window in heldout)
    assert loss_sum / tokens == pytest.approx(math.log(SIZES.vocab_size), rel=1e-6)
    assert before[0] < loss_sum
    assert watched.evaluate([]) == (0.0, 0)


def test_evaluation_leaves_training_alone_and_sees_writes() -> None:
    run_ranks(evaluation_on_a_rank, 2)


def rerun_on_a_rank(rank: int, degrees: Degrees) -> list[tuple[list[float | None], list[Tensor]]]:
    found = []
    for _ in range(2):
        trainer = build_trainer(degrees)
        found.append(([result.loss for result in train(trainer, 3)], snapshot(trainer.params)))
    return found


@pytest.mark.parametrize(
    "degrees", [FSDP2, REPLICATE2, Degrees(pp=2, tp=2), Degrees(cp=2)], ids=str
)
def test_a_rerun_gives_the_same_bits(degrees: Degrees) -> None:
    for first, second in run_ranks(rerun_on_a_rank, degrees.num_ranks, degrees):
        assert first[0] == second[0]
        assert_same_bits(first[1], second[1])


def joiner_on_a_rank(rank: int) -> tuple[float, float]:
    config = OPTIMIZER.model_copy(update={"tokens_per_step": 100})
    with pytest.raises(InputError, match=r"optimizer\.tokens_per_step \(100\)"):
        build_trainer(ONE, config=config)
    joiner = build_trainer(ONE)
    joiner.inner_step = 30
    old = build_trainer(ONE)
    old.inner_step = 29
    train(old, 1)
    return joiner.step(share(joiner, batch(0))).lr, old.step(share(old, batch(0))).lr


def test_a_joiner_continues_the_learning_rate_schedule() -> None:
    joiner_lr, old_lr = run_ranks(joiner_on_a_rank, 1)[0]
    assert joiner_lr == old_lr < OPTIMIZER.lr


def ignored_on_a_rank(rank: int) -> StepResult:
    trainer = build_trainer(ONE)
    before = snapshot(trainer.params)
    result = trainer.step([torch.full_like(window, -100) for window in share(trainer, batch(0))])
    assert_same_bits(snapshot(trainer.params), before)
    return result


def test_a_step_without_any_valid_target_is_skipped() -> None:
    result = run_ranks(ignored_on_a_rank, 1)[0]
    assert (result.is_skipped, result.tokens, result.loss) == (True, 0, None)


def clipped_on_a_rank(rank: int) -> list[tuple[float, float]]:
    """(gradient norm before, norm of the SGD update / lr) with and without clipping."""
    found = []
    for clip_norm in (None, 0.01):
        config = OPTIMIZER.model_copy(
            update={"name": "sgd", "weight_decay": 0.0, "clip_norm": clip_norm}
        )
        trainer = build_trainer(ONE, config=config)
        before = snapshot(trainer.params)
        result = train(trainer, 1)[0]
        moved = torch.cat(
            [(a - b).flatten() for a, b in zip(before, snapshot(trainer.params), strict=True)]
        )
        found.append((result.grad_norm, float(moved.double().norm()) / result.lr))
    return found


def test_clipping_scales_the_whole_gradient_to_the_norm() -> None:
    (norm, update), (norm_before_clip, clipped) = run_ranks(clipped_on_a_rank, 1)[0]
    assert norm == norm_before_clip == pytest.approx(update, rel=1e-3)
    assert clipped == pytest.approx(0.01, rel=1e-3)
