"""Whose values config.yaml in the folder of a run has, when islands with other values are started
there.
"""

import signal
from pathlib import Path

import torch

from diloco.config.schema import Config, load_config
from diloco.own_loop.islands import Islands
from tests.diloco.own_loop.loops import (
    ModelAndDigest,
    finish,
    own_config,
    small_model,
    train_from_saved,
    train_saving_and_die,
    train_small,
)
from tests.faults.waits import until
from tests.swarm import read_records, swarm

SAVED = "island.checkpoint.every_rounds=1"


def test_a_run_that_goes_on_with_another_learning_rate_says_so(tmp_path: Path) -> None:
    for rounds, lr in ((1, 1e-2), (2, 3e-2)):
        with swarm(
            tmp_path, SAVED, f"outer.rounds={rounds}", f"optimizer.lr={lr}", islands=[{}]
        ) as made:
            made.run_all()
    assert load_config(tmp_path / "test" / "config.yaml").run.optimizer.lr == 3e-2


def test_an_island_whose_checkpoint_is_of_another_model_leaves_the_config(tmp_path: Path) -> None:
    with swarm(tmp_path, SAVED, "outer.rounds=1", islands=[{}]) as made:
        made.run_all()
    with swarm(tmp_path, SAVED, "outer.rounds=2", "model.dim=64", islands=[{}]) as made:
        assert made.start(0).wait() == [1]
    assert load_config(tmp_path / "test" / "config.yaml").run.model.dim == 32


def test_a_loop_of_ones_own_whose_saved_state_is_of_another_run_leaves_the_config(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, islands=[{}]) as made:
        assert made.start(0, train_saving_and_die(tmp_path, 1)).wait() == [-signal.SIGKILL]
    with swarm(tmp_path, islands=[{}]) as made:  # with a rendezvous that has not heard of the first
        assert made.start(0, train_from_saved(tmp_path, codec="int8")).wait() == [1]
    assert load_config(tmp_path / "own" / "config.yaml").run.outer.codec == "fp32"


def test_a_run_begun_anew_under_its_name_keeps_its_own_config(tmp_path: Path) -> None:
    for codec in ("fp32", "int8"):
        with swarm(tmp_path, islands=[{}]) as made:
            made.start(0, train_small(codec=codec, rounds=1)).finish()
    assert load_config(tmp_path / "own" / "config.yaml").run.outer.codec == "int8"


def test_an_island_that_is_refused_for_its_config_leaves_that_of_the_run(tmp_path: Path) -> None:
    def wait_in_the_run(config: Config, index: int) -> ModelAndDigest:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        islands = Islands(
            own_config(config, index, start_islands=1, codec="fp32"), model, optimizer
        )
        until(lambda: (tmp_path / "refused").exists(), "the other island is refused")
        return finish(islands, model, optimizer)

    with swarm(tmp_path, islands=[{}, {}]) as made:
        first = made.start(0, wait_in_the_run)
        until(
            lambda: bool(read_records(tmp_path / "own/island-0/metrics.jsonl")), "the run has begun"
        )
        assert made.start(1, train_small(codec="int8", start_islands=1)).wait() != [0]
        (tmp_path / "refused").touch()
        first.finish()
    assert load_config(tmp_path / "own" / "config.yaml").run.outer.codec == "fp32"
