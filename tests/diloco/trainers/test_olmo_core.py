"""The callback for OLMo-core's trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("olmo_core.train", reason="needs the package ai2-olmo-core")

from olmo_core.train import Duration, Trainer
from olmo_core.train.callbacks import EvaluatorCallback

from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.trainers.olmo_core import IslandsCallback
from tests.diloco.trainers.small_olmo_core import BATCH_TOKENS, Look, build, fit
from tests.swarm import read_records

pytestmark = pytest.mark.slow


def alone(folder: Path, **outer: Any) -> IslandsCallback:
    """The callback of a run of one island."""
    rules = {"transport": "loopback", "rounds": 3, "inner_steps": 2, "start_islands": 1}
    return IslandsCallback(
        {"name": "run", "outer": rules | outer, "island": {"run_dir": str(folder / "runs")}}
    )


def islands_of(trainer: Trainer) -> Islands:
    callback = trainer.callbacks["islands"]
    assert isinstance(callback, IslandsCallback)
    return callback.islands


def test_islands_whose_first_round_has_not_ended_change_no_bit_of_training(tmp_path: Path) -> None:
    plain, with_islands = Look(20), Look(20)
    fit(tmp_path / "plain", None, plain)
    fit(tmp_path / "islands", alone(tmp_path, inner_steps=300), with_islands)
    assert len(plain.losses) == 20
    assert with_islands.losses == plain.losses
    assert with_islands.seen == plain.seen


def test_the_runs_end_stops_the_trainer_and_each_step_counts_its_tokens(tmp_path: Path) -> None:
    look = Look()
    trainer = fit(tmp_path, alone(tmp_path), look)
    assert islands_of(trainer).is_over
    assert islands_of(trainer).round == 3
    assert len(look.losses) == 6
    steps = [
        each
        for each in read_records(tmp_path / "runs/run/island-0/metrics.jsonl")
        if each["kind"] == "step"
    ]
    assert [each["tokens"] for each in steps] == [BATCH_TOKENS * (step + 1) for step in range(6)]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_trainer_that_resumes_from_its_checkpoint_goes_on_where_it_was(
    tmp_path: Path, delay: int
) -> None:
    whole = fit(tmp_path / "whole", alone(tmp_path / "whole", delay=delay), save_interval=3)
    broken = fit(
        tmp_path / "broken", alone(tmp_path / "broken", delay=delay), Look(4), save_interval=3
    )
    assert islands_of(broken).digest != islands_of(whole).digest
    again, load_path = Look(), str(tmp_path / "broken" / "step3")
    resumed = fit(
        tmp_path / "again", alone(tmp_path / "broken", delay=delay), again, load_path=load_path
    )
    assert [step for step, _ in again.seen] == [4, 5, 6]
    assert islands_of(resumed).digest == islands_of(whole).digest


def test_a_trainer_that_resumes_without_the_state_of_islands_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, None, Look(3), save_interval=3)
    with pytest.raises(
        ConfigError, match=r"resumes at its step 3 without the state of Islands.*load_trainer_state"
    ):
        fit(tmp_path, alone(tmp_path))
    assert not (tmp_path / "runs").exists(), "the run was not entered"


def test_a_trainer_that_ends_before_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_duration is 5, and the run has 6 steps"):
        fit(tmp_path, alone(tmp_path), max_duration=Duration.steps(5))


class Evaluates(EvaluatorCallback):
    """Keeps the values of the first parameter, where others measure the held-out loss."""

    def perform_eval(self, prefix: str = "eval") -> None:
        self.held.append(next(self.trainer.train_module.model.parameters()).detach().clone())


def test_the_global_params_are_evaluated_and_training_goes_on_with_the_local_ones(
    tmp_path: Path,
) -> None:
    plain = fit(tmp_path / "plain", alone(tmp_path / "plain", rounds=2, inner_steps=4))
    evaluator = Evaluates(eval_interval=1)
    evaluator.held = []
    trainer = build(tmp_path, alone(tmp_path, rounds=2, inner_steps=4), Look())
    trainer.add_callback("evaluator", evaluator)
    begin = next(trainer.train_module.model.parameters()).detach().clone()
    trainer.fit()
    second, third, fourth, fifth = evaluator.held[:4]
    assert torch.equal(second, begin) and torch.equal(third, begin), (
        "those of the start, in the first round"
    )
    assert not torch.equal(fourth, third), "the round has landed"
    assert torch.equal(fifth, fourth)
    assert islands_of(trainer).digest == islands_of(plain).digest


def test_rounds_bytes_and_waits_are_metrics_of_the_trainer(tmp_path: Path) -> None:
    look = Look()
    fit(tmp_path, alone(tmp_path), look)
    found = {
        step: each["islands/round"]
        for step, each in look.metrics.items()
        if "islands/round" in each
    }
    assert found == {2: 0, 4: 1, 6: 2}
    assert {"islands/bytes_sent", "islands/bytes_received", "islands/wait_seconds"} <= set(
        look.metrics[2]
    )
