"""Z-loss, spikes and the noise scale come out the same on every mesh, and change nothing that they
should not.
"""

from functools import cache
from typing import Any

import pytest
import torch

from inner.config import OptimizerConfig, SpikeConfig
from inner.mesh import Degrees
from tests.harness import run_ranks
from tests.inner.small import (
    OPTIMIZER,
    SEQ_LEN,
    SEQUENCES,
    batch,
    build_trainer,
    relative_error,
    share,
    whole_model,
)

ONE, FSDP2, PP2_TP2 = Degrees(), Degrees(dp_shard=2), Degrees(pp=2, tp=2)
STEPS, SPIKE = 8, 6
SPIKES = SpikeConfig(steps=4, deviations=1, action="skip")
ALL = OPTIMIZER.model_copy(update={"z_loss": 0.01, "noise_scale_every": 3, "spikes": SPIKES})


def text(step: int) -> torch.Tensor:
    """The step's sequences; those of SPIKE are of one token that no other step has as a target so
    often.
    """
    return torch.full((SEQUENCES, SEQ_LEN + 1), 60) if step == SPIKE else batch(step)


def life_on_a_rank(rank: int, degrees: Degrees, config: OptimizerConfig) -> dict[str, Any]:
    trainer = build_trainer(degrees, config=config)
    found: dict[str, Any] = {
        "steps": [trainer.step(share(trainer, text(step))) for step in range(1, SPIKE)]
    }
    before = whole_model(trainer.params)[0]
    found["steps"] += [trainer.step(share(trainer, text(step))) for step in range(SPIKE, SPIKE + 1)]
    after = whole_model(trainer.params)[0]
    found["is_unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
    found["steps"] += [
        trainer.step(share(trainer, text(step))) for step in range(SPIKE + 1, STEPS + 1)
    ]
    found["final"], found["losses"] = whole_model(trainer.params)[0], trainer.spikes.losses
    return found


@cache
def life(degrees: Degrees, settings: str = "all") -> list[dict[str, Any]]:
    plain = (
        {"z_loss": 0.0}
        if settings == "no z-loss"
        else {"noise_scale_every": 0}
        if settings == "no noise"
        else {}
    )
    return run_ranks(life_on_a_rank, degrees.num_ranks, degrees, ALL.model_copy(update=plain))


@pytest.mark.parametrize("degrees", [FSDP2, PP2_TP2], ids=str)
def test_weights_losses_and_noise_are_those_of_one_process(degrees: Degrees):
    (one,), many = life(ONE), life(degrees)[0]
    assert [step.loss for step in many["steps"]] == pytest.approx(
        [step.loss for step in one["steps"]], rel=1e-5
    )
    for mine, theirs in zip(many["steps"], one["steps"], strict=True):
        assert (mine.noise is None) == (theirs.noise is None) == ((mine.step - 1) % 3 != 0)
        if mine.noise and theirs.noise:
            assert mine.noise.signal == pytest.approx(theirs.noise.signal, rel=1e-3)
            assert mine.noise.noise == pytest.approx(theirs.noise.noise, rel=1e-3)
    assert (
        max(relative_error(many["final"][name], one["final"][name]) for name in one["final"]) < 1e-3
    )


@pytest.mark.parametrize("degrees", [ONE, FSDP2, PP2_TP2], ids=str)
def test_a_spike_is_seen_and_skipped_by_all_ranks_alike(degrees: Degrees):
    for found in life(degrees):
        assert [step.step for step in found["steps"] if step.spike] == [SPIKE]
        assert [step.step for step in found["steps"] if step.is_skipped] == [SPIKE]
        assert found["is_unchanged"] and found["losses"] == life(degrees)[0]["losses"]


def test_measuring_the_noise_changes_no_bit_of_the_training():
    (one,), (without,) = life(ONE), life(ONE, "no noise")
    assert all(torch.equal(one["final"][name], without["final"][name]) for name in one["final"])


def test_z_loss_changes_the_weights_and_not_what_the_first_step_reports():
    (one,), (without,) = life(ONE), life(ONE, "no z-loss")
    assert one["steps"][0].loss == without["steps"][0].loss
    assert not torch.equal(one["final"]["head.weight"], without["final"]["head.weight"])
