"""The bytes of an island's state, as the plan counts them, are those of a real checkpoint and a
real download.
"""

from pathlib import Path

import pytest

from diloco.config.check import model_specs
from diloco.planning.state_times import count_state_bytes
from diloco.simulate.in_process import configure_in_process
from diloco.simulate.threads import train_together
from tests.swarm import swarm

SIZES = [
    "model.dim=128",
    "outer.part_elements=100_000",
    "outer.rounds=2",
    "island.checkpoint.every_rounds=10",
]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["optimizer.name=muon"],
        ["outer.optimizer={lr: 0.7, momentum: 0.9}"],
        ["outer.moments=[1,1]"],
        ["outer.codec=int4", "outer.coding.feedback=0.9"],
    ],
    ids=["adamw", "muon", "outer momentum", "moments", "error feedback"],
)
def test_a_checkpoint_has_the_counted_bytes(settings: list[str], tmp_path: Path) -> None:
    with swarm(tmp_path, *SIZES, *settings, islands=[{"ranks": 1}] * 2) as islands:
        config = configure_in_process(islands.config, has_disturbances=False)
        islands.start(0, lambda config, index: train_together(config), config).finish(200)
        counted = count_state_bytes(config.run, model_specs(config.run, 260), 2)
    newest = max((tmp_path / "test/island-0/checkpoints").glob("step-*"))
    on_disk = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    # Indexes and the headers of the tensors come on top.
    assert counted.saved <= on_disk <= 1.05 * counted.saved + 100_000, on_disk - counted.saved
