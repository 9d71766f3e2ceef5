"""Biases of routers are committed state: equal on islands of unequal meshes, through a kill, a
joiner and a NaN.
"""

import json
import signal
from pathlib import Path

import pytest
import torch

from diloco import island as life
from diloco.assemble import Runtime
from diloco.checkpoints.global_params import read_global_params
from diloco.config.schema import Config
from diloco.train import train
from inner.model.buffers import saved_buffers
from tests.faults.waits import assert_one_history, until
from tests.swarm import swarm

EXPERTS = {"number": 4, "per_token": 2, "dim": 16, "dense_layers": 1}
MIXTURE = (
    f"model.experts={json.dumps(EXPERTS)}",
    "optimizer.balance.bias_speed=0.02",
    "outer.optimizer.momentum=0.9",
    "outer.codec=int8",
)
EP2 = {"ranks": 2, "mesh": {"ep": 2}}


def train_and_return_biases(config: Config, index: int) -> dict[str, torch.Tensor]:
    """Train an island and return the live biases of rank 0 after the last round."""
    biases: dict[str, torch.Tensor] = {}

    def live(parts: Runtime) -> None:
        life.run(parts)
        biases.update(
            {
                buffer.name: buffer.tensor.clone()
                for buffer in saved_buffers(parts.trainer.model_parts)
            }
        )

    train(config, index, live)
    return biases


@pytest.mark.slow
def test_biases_are_equal_on_all_islands_after_a_kill_a_joiner_and_a_nan(tmp_path: Path) -> None:
    stages = {"ranks": 2, "mesh": {"pp": 2}, "faults": ["nan:1@round=2"]}
    joiner = {"ranks": 2, "mesh": {"tp": 2, "ep": 2}, "joins": True}
    islands = [EP2, stages, {}, joiner]
    with swarm(
        tmp_path, *MIXTURE, "outer.rounds=12", "outer.start_islands=3", islands=islands
    ) as made:
        running = [made.start(index, train_and_return_biases) for index in range(3)]
        running[2].wait_for_round(1)
        running[2].signal(signal.SIGKILL)
        running[2].wait()
        running[2] = made.start(2, train_and_return_biases)
        running.append(made.start(3, train_and_return_biases))
        for island in running:
            island.finish()
        assert_one_history(*running)
        first, of_no_mixture, *others = (island.result() for island in running)
    name = "layers.1.ffn.router.bias"
    assert set(first) == {name} and first[name].any()
    assert of_no_mixture == {}, "the first stage has no mixture"
    assert all(torch.equal(first[name], theirs[name]) for theirs in others)


@pytest.mark.slow
def test_a_run_goes_on_with_another_ep_and_the_biases_it_has_committed(tmp_path: Path) -> None:
    saving = (*MIXTURE, "outer.rounds=10", "island.checkpoint.every_rounds=1")
    with swarm(tmp_path, *saving, islands=[EP2, {}]) as made:
        made.start_all()
        until(
            lambda: (
                len({path.parent for path in tmp_path.glob("**/checkpoints/step-????????")}) == 2
            ),
            "both have saved",
        )
    _, before = read_global_params(tmp_path / "test", "island-0")
    with swarm(tmp_path, *saving, islands=[{}, EP2]) as made:
        for island in made.start_all(train_and_return_biases):
            island.finish()
        assert_one_history(*made.started)
        assert all(island.events("resumed") for island in made.started)
        first, second = (island.result() for island in made.started)
    name = "layers.1.ffn.router.bias"
    assert torch.equal(first[name], second[name]) and not torch.equal(first[name], before[name])
    _, after = read_global_params(tmp_path / "test", "island-1")
    assert torch.equal(after[name], first[name]) and before[name].any()
