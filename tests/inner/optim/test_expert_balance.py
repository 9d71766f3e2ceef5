"""The balance of experts: what moves the biases, and what does not."""

import pytest
import torch

from inner.config import BalanceConfig, ParallelConfig
from inner.mesh import Degrees
from inner.model.experts import mixtures
from inner.optim.expert_balance import COLLAPSED_STEPS, CollapseWatch, RoutingResult
from inner.trainer import StepResult, Trainer
from tests.harness import run_ranks
from tests.inner.parallel.test_expert import ADAMW, SIZES
from tests.inner.small import SEQ_LEN, SEQUENCES, batch, build_trainer, share

SPEED = 0.01
CONFIG = ADAMW.model_copy(update={"balance": BalanceConfig(bias_speed=SPEED)})
J = 2
LAYERS = 2


def biases(trainer: Trainer) -> list[list[float]]:
    return [mixture.router.bias.tolist() for mixture in mixtures(trainer.model_parts)]


def stepped_on_a_rank(
    rank: int, changes: dict, parallel: ParallelConfig
) -> tuple[StepResult, list[list[float]], list[list[float]]]:
    trainer = build_trainer(Degrees(), SIZES, CONFIG.model_copy(update=changes), parallel)
    trainer.step(share(trainer, batch(0)))
    before = biases(trainer)
    result = trainer.step(share(trainer, batch(1)))
    return result, before, biases(trainer)


def stepped(
    changes: dict | None = None, **how: object
) -> tuple[StepResult, list[list[float]], list[list[float]]]:
    return run_ranks(stepped_on_a_rank, 1, changes or {}, ParallelConfig.model_validate(how))[0]


def test_each_step_moves_biases_toward_an_equal_load_and_keeps_their_sum() -> None:
    result, before, after = stepped()
    assert result.routing is not None
    assert any(map(any, before))
    for counts, old, new in zip(result.routing.counts, before, after, strict=True):
        mean = sum(counts) / len(counts)
        signs = [(mean > count) - (mean < count) for count in counts]
        expected = [
            b + SPEED * (sign - sum(signs) / len(signs)) for b, sign in zip(old, signs, strict=True)
        ]
        assert new == pytest.approx(expected, abs=1e-7)
        assert sum(new) == pytest.approx(0.0, abs=1e-7)


def test_without_a_speed_biases_stay() -> None:
    _, before, after = stepped({"balance": BalanceConfig(bias_speed=0.0)})
    assert before == after == [[0.0] * 4] * LAYERS


def test_inputs_are_counted_once_whatever_is_repeated_or_measured() -> None:
    windows = batch(1)
    inputs = int((windows[:, :-1] >= 0).sum())
    assert inputs < SEQUENCES * SEQ_LEN, "some positions are padding"
    for result, _, _ in (stepped(), stepped(recompute="full"), stepped({"noise_scale_every": 1})):
        assert result.routing is not None
        assert result.routing.num_tokens == inputs
        assert [sum(counts) for counts in result.routing.counts] == [J * inputs] * LAYERS


def test_losses_that_have_a_weight_are_reported_beside_the_loss() -> None:
    plain = stepped()[0]
    weighted = stepped(
        {"balance": BalanceConfig(bias_speed=0.0, sequence_loss=1e-9, router_z_loss=1e-9)}
    )[0]
    assert plain.routing is not None and weighted.routing is not None
    assert plain.routing.figures == {"dropped": 0}
    assert 1 <= weighted.routing.figures["sequence_loss"] < 4
    assert weighted.routing.figures["router_z_loss"] == pytest.approx(
        torch.tensor(4.0).log().item() ** 2, rel=0.05
    )
    assert set(weighted.routing.loads_by_layer) == {"0", "1"}
    assert min(weighted.routing.loads) >= 1


def left_alone_on_a_rank(
    rank: int,
) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    trainer = build_trainer(Degrees(), SIZES, CONFIG)
    trainer.step(share(trainer, batch(0)))
    before = biases(trainer)
    trainer.evaluate([batch(5)[:3]])
    evaluated = biases(trainer)
    weight = trainer.model_parts[0].get_parameter("norm.weight")
    with torch.no_grad():
        weight.fill_(torch.inf)
    assert trainer.step(share(trainer, batch(1))).is_skipped
    return before, evaluated, biases(trainer)


def test_evaluation_and_skipped_steps_leave_the_biases_alone() -> None:
    before, evaluated, skipped = run_ranks(left_alone_on_a_rank, 1)[0]
    assert before == evaluated == skipped


def broken_on_a_rank(rank: int) -> str:
    trainer = build_trainer(Degrees(), SIZES, CONFIG.model_copy(update={"max_skipped_steps": 0}))
    router = mixtures(trainer.model_parts)[1].router
    with torch.no_grad():
        router.weight[0, 0] = torch.nan
    try:
        trainer.step(share(trainer, batch(0)))
    except Exception as error:  # noqa: BLE001 - its text is what is tested
        return str(error)
    return ""


def test_a_router_that_is_not_finite_is_named() -> None:
    assert (
        "the first router that was not finite is that of layer 1"
        in run_ranks(broken_on_a_rank, 1)[0]
    )


def routing(counts: tuple[int, ...]) -> RoutingResult:
    return RoutingResult(100, (3,), (counts,), 0.0, 0.0, 0, ())


def test_a_layer_with_one_full_expert_for_long_is_told_once() -> None:
    watch = CollapseWatch()
    told = [watch.observe(routing((60, 70, 40, 30))) for _ in range(COLLAPSED_STEPS - 1)]
    assert not any(told)
    assert watch.observe(routing((50, 50, 50, 50))) == (), "an even step begins anew"
    told = [watch.observe(routing((90, 70, 20, 20))) for _ in range(3 * COLLAPSED_STEPS)]
    assert [layers for layers in told if layers] == [(3,)] and told[COLLAPSED_STEPS - 1] == (3,)
