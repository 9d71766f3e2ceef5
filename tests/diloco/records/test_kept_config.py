"""Whose values config.yaml in the folder of a run has, when islands with other values are started there."""

import signal
from pathlib import Path

from diloco.config.schema import load_config
from tests.diloco.own_loop.loops import train_from_saved, train_saving_and_die
from tests.swarm import swarm

SAVED = "island.checkpoint.every_rounds=1"


def test_a_run_that_goes_on_with_another_learning_rate_says_so(tmp_path: Path) -> None:
    for rounds, lr in ((1, 1e-2), (2, 3e-2)):
        with swarm(tmp_path, SAVED, f"outer.rounds={rounds}", f"optimizer.lr={lr}", islands=[{}]) as made:
            made.run_all()
    assert load_config(tmp_path / "test" / "config.yaml").run.optimizer.lr == 3e-2


def test_an_island_whose_checkpoint_is_of_another_model_leaves_the_config(tmp_path: Path) -> None:
    with swarm(tmp_path, SAVED, "outer.rounds=1", islands=[{}]) as made:
        made.run_all()
    with swarm(tmp_path, SAVED, "outer.rounds=2", "model.dim=64", islands=[{}]) as made:
        assert made.start(0).wait() == [1]
    assert load_config(tmp_path / "test" / "config.yaml").run.model.dim == 32


def test_a_loop_of_ones_own_whose_saved_state_is_of_another_run_leaves_the_config(tmp_path: Path) -> None:
    with swarm(tmp_path, islands=[{}]) as made:
        assert made.start(0, train_saving_and_die(tmp_path, 1)).wait() == [-signal.SIGKILL]
    with swarm(tmp_path, islands=[{}]) as made:  # with a rendezvous that has not heard of the first
        assert made.start(0, train_from_saved(tmp_path, codec="int8")).wait() == [1]
    assert load_config(tmp_path / "own" / "config.yaml").run.outer.codec == "fp32"
