"""A run whose model, text and optimizer are own code, over two islands of different shape."""

from pathlib import Path

import pytest

from tests.swarm import swarm

OWN = [
    "model={name: 'tests.own.models:GatedConv', options: {dim: 16}}",
    "optimizer.name=tests.own.optimizers:Lion",
    "optimizer.options={beta2: 0.98}",
    "data={source: 'tests.own.sources:Tables', options: {numbers: 200}, seq_len: 32, "
    "heldout_fraction: 0.3}",
    "island.checkpoint.every_rounds=2",
    "outer.fragments=2",
    "outer.rounds=2",
    "outer.quorum=2",
]


@pytest.mark.slow
def test_own_model_source_and_optimizer_train_over_islands_of_different_shape(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, *OWN, islands=[{"ranks": 2}, {"ranks": 1}]) as made:
        islands = made.start_all()
        for island in islands:
            island.finish()
        first, second = (island.committed() for island in islands)
    assert len(first) == made.config.outer.num_rounds
    assert [record["digest"] for record in first.values()] == [
        record["digest"] for record in second.values()
    ]
    losses = [record["loss"] for record in islands[0].records("eval")]
    assert losses[-1] < losses[0] - 0.2
    assert all(record["mfu"] is None for record in islands[0].records("step"))
