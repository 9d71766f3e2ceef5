"""Runs of torchtitan's trainer with islands: alone, on unequal islands, from its own
checkpoints.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: docs/library.md says how")

from torchtitan.trainer import Trainer

from tests.diloco.titan import small
from tests.diloco.titan.islands_of_titan import STEPS, draw_by_name, trains
from tests.swarm import swarm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
WAIT_SECONDS = 1500.0
NEVER = {"rounds": 1, "inner_steps": 1000, "start_islands": 1, "quorum": 1}
KEPT = ("loss_metrics/global_avg_loss", "grad_norm", "lr/AdamW")


def end_after_20(config: Trainer.Config) -> None:
    config.training.steps = 1000
    config.dataloader.num_batches = 20


def test_20_steps_are_the_same_bits_without_islands_and_with_a_round_that_never_ends(
    tmp_path: Path,
) -> None:
    logged = []
    for make in (small.plain_llama3, small.llama3):
        with swarm(tmp_path / make.__name__, islands=[{"ranks": 2}]) as made:
            work = trains(make, change=end_after_20, outer=NEVER)
            made.start(0, work).finish(WAIT_SECONDS)
            steps = made.started[0].result()["steps"]
        logged.append({step: [metrics[name] for name in KEPT] for step, metrics in steps.items()})
    assert logged[0] == logged[1]
    assert list(logged[0]) == list(range(1, 21))


def test_islands_of_different_layouts_end_with_one_model(tmp_path: Path) -> None:
    pipeline = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
    with swarm(tmp_path, islands=[{"ranks": 2}, {"ranks": 2}, {}]) as made:
        made.start(0, trains(small.llama3, begin=draw_by_name))
        made.start(1, trains(small.llama3_recomputed, begin=draw_by_name, **pipeline))
        made.start(2, trains(small.llama3, begin=draw_by_name))
        for island in made.started:
            island.finish(WAIT_SECONDS)
        first, *others = (island.result() for island in made.started)
    for other in others:
        assert (other["digest"], other["tensors"]) == (first["digest"], first["tensors"])


def save_every_four(config: Trainer.Config) -> None:
    config.checkpoint.enable = True
    config.checkpoint.interval = 4


def save_and_die_at_six(config: Trainer.Config) -> None:
    save_every_four(config)
    config.dataloader.killed_at = 5


def end_of(folder: Path, ranks: list[int], *, is_killed: bool) -> list[dict[str, Any]]:
    """What islands of so many ranks have after two rounds. All may be killed before their sixth
    step and start again.

    They have saved after the fourth one, with a round in flight.
    """
    outer = {"delay": 2, "rounds": 2}
    with swarm(folder, islands=[{"ranks": number} for number in ranks]) as made:
        if is_killed:
            for island in made.start_all(trains(change=save_and_die_at_six, outer=outer)):
                codes = island.wait(WAIT_SECONDS)
                assert -signal.SIGKILL in codes, island.log[-3000:]
        again = made.start_all(trains(change=save_every_four, outer=outer))
        for island in again:
            island.finish(WAIT_SECONDS)
        return [island.result() for island in again]


@pytest.mark.parametrize("ranks", [[1], [2, 1]], ids=str)
def test_a_run_whose_processes_are_all_killed_goes_on_bit_for_bit(
    tmp_path: Path, ranks: list[int]
) -> None:
    whole = end_of(tmp_path / "whole", ranks, is_killed=False)
    resumed = end_of(tmp_path / "resumed", ranks, is_killed=True)
    assert [end["step"] for end in resumed] == [2 * STEPS] * len(ranks)
    assert list(resumed[0]["steps"]) == [5, 6]
    assert [end["digest"] for end in resumed] == [end["digest"] for end in whole]
    assert [end["tensors"] for end in resumed] == [end["tensors"] for end in whole]


def test_an_island_resumes_alone_after_the_others_went_on(tmp_path: Path) -> None:
    outer = {"quorum": 1, "rounds": 30}

    def many(config: Trainer.Config) -> None:
        save_every_four(config)
        config.training.steps = 30 * STEPS

    def few(config: Trainer.Config) -> None:
        many(config)
        config.dataloader.killed_at = 5

    with swarm(tmp_path, islands=[{"ranks": 2}, {}]) as made:
        first = made.start(0, trains(change=many, outer=outer))
        assert made.start(1, trains(change=few, outer=outer)).wait(WAIT_SECONDS) == [
            -signal.SIGKILL
        ]
        back = made.start(1, trains(change=many, outer=outer))
        for island in (first, back):
            island.finish(WAIT_SECONDS)
        ends = [first.result(), back.result()]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["tensors"] == ends[1]["tensors"]
    rates = [{step: metrics["lr/AdamW"] for step, metrics in end["steps"].items()} for end in ends]
    assert rates[1].items() <= rates[0].items()


def validate(config: Trainer.Config) -> None:
    config.validator.enable = True


def test_islands_validate_the_global_params(tmp_path: Path) -> None:
    """In the middle of a round too, where local params differ: freq is 2 and a round has 3
    steps.
    """
    with swarm(tmp_path, islands=[{}, {}]) as made:
        for island in made.start_all(trains(change=validate)):
            island.finish(WAIT_SECONDS)
        ends = [island.result()["steps"] for island in made.started]
    losses = [
        {step: m.get("validation_metrics/loss") for step, m in steps.items()} for steps in ends
    ]
    assert losses[0] == losses[1]
    assert len([loss for loss in losses[0].values() if loss]) == 7
    assert ends[0][2][KEPT[0]] != ends[1][2][KEPT[0]], "they train on different text"
