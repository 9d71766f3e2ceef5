"""DiLoCo's limits: with the right settings the whole program is data-parallel or plain training,
number for number.
"""

import pytest
import torch

from diloco.config.schema import Config
from tests.swarm import Swarm, swarm, train_and_return_params

ONE = {"ranks": 1}
SGD = [
    "optimizer.name=sgd",
    "optimizer.lr=0.05",
    "optimizer.clip_norm=null",
    "optimizer.weight_decay=0",
]
AVERAGE = "outer.optimizer={lr: 1.0, momentum: 0.0, nesterov: false}"


def train_plainly(num_islands: int):
    """Work for a forked rank: data-parallel training of `num_islands` islands' tokens, and its
    params.
    """

    def work(config: Config, index: int) -> dict[str, torch.Tensor]:
        from diloco.assemble import build_trainer
        from diloco.runtime.corpus import load_corpus
        from diloco.runtime.process_group import open_process_group
        from diloco.train import train_data_parallel

        run, island = config.run, config.for_island(index)
        with open_process_group(island, "cpu"):
            corpus = load_corpus(run, island)
            trainer = build_trainer(run, island, corpus, "cpu", num_islands=num_islands)
            train_data_parallel(run, island, corpus, trainer, num_islands, None)
            params = trainer.params
            return {held.name: params.read(i).clone() for i, held in enumerate(params.slices)}

    return work


def reference(islands: Swarm, num_islands: int) -> dict[str, torch.Tensor]:
    config = islands.config.model_copy(update={"name": "reference"})
    island = islands.start(0, train_plainly(num_islands), config)
    island.finish()
    return island.result()


def assert_close(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float
) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        difference = (ours[name] - values).norm() / values.norm()
        assert difference <= relative, f"{name}: {difference:.2e}"


def test_averaging_after_every_sgd_step_is_data_parallel_sgd(tmp_path):
    settings = [*SGD, AVERAGE, "outer.inner_steps=1", "outer.rounds=8"]
    with swarm(tmp_path, *settings, islands=[ONE, ONE]) as islands:
        running = islands.start_all(train_and_return_params)
        for island in running:
            island.finish()
        assert_close(running[0].result(), reference(islands, 2), 1e-6)


def test_one_island_that_only_averages_with_itself_is_plain_training(tmp_path):
    settings = [
        "optimizer.name=adamw",
        AVERAGE,
        "outer.inner_steps=3",
        "outer.rounds=4",
        "outer.transport=loopback",
    ]
    with swarm(tmp_path, *settings, islands=[ONE]) as islands:
        island = islands.start(0, train_and_return_params)
        island.finish()
        assert_close(island.result(), reference(islands, 1), 1e-5)


def test_two_islands_hold_bit_equal_params_at_the_end(tmp_path):
    with swarm(tmp_path, "outer.codec=int8", islands=[ONE, ONE]) as islands:
        first, second = islands.start_all(train_and_return_params)
        first.finish()
        second.finish()
        for name, values in first.result().items():
            assert torch.equal(values, second.result()[name])


def test_the_parity_checks_can_fail(tmp_path):
    settings = [
        *SGD,
        "outer.optimizer={lr: 0.9, momentum: 0.0, nesterov: false}",
        "outer.inner_steps=1",
    ]
    with swarm(tmp_path, *settings, islands=[ONE, ONE]) as islands:
        running = islands.start_all(train_and_return_params)
        for island in running:
            island.finish()
        with pytest.raises(AssertionError):
            assert_close(running[0].result(), reference(islands, 2), 1e-6)
