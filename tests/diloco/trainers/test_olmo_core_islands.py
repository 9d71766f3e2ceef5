"""Several islands under OLMo-core's trainer: one comes late, and may have another layout of
ranks.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("olmo_core.train", reason="needs the package ai2-olmo-core")

from olmo_core.distributed.parallel import DataParallelType
from olmo_core.train.train_module import TransformerDataParallelConfig

from diloco.config.schema import Config
from diloco.trainers.olmo_core import IslandsCallback
from tests.diloco.own_loop.loops import STEPS, folder_of, own_config
from tests.diloco.own_loop.test_coming_back import RUN, rounds
from tests.diloco.trainers.small_olmo_core import WARM_UP, Look, fit
from tests.faults.waits import until
from tests.swarm import read_records, swarm

pytestmark = pytest.mark.slow

FSDP = {"dp_config": TransformerDataParallelConfig(name=DataParallelType.fsdp)}


class WaitsForOther(Look):
    """Waits in the fourth round until the other island has entered."""

    def __init__(self, other: Path) -> None:
        super().__init__()
        self._other = other

    def post_train_batch(self) -> None:
        super().post_train_batch()
        if self.step == 3 * STEPS:
            until(
                lambda: bool(read_records(self._other / "metrics.jsonl")), "the other has entered"
            )


def train(config: Config, index: int, parallel: dict[str, Any]) -> tuple[str, list[Any]]:
    """Train to the end. Returns the digest, and steps with their learning rates."""
    os.environ["OLMO_SHARED_FS"] = "1"
    if config.for_island(index).ranks > 1:
        dist.init_process_group("gloo")
    look = Look() if index else WaitsForOther(folder_of(config, 1))
    callback = IslandsCallback(own_config(config, index, {"joins": index == 1}, **RUN))
    folder = folder_of(config, index) / "trainer"
    trainer = fit(folder, callback, look, parallel=parallel, no_checkpoints=True)
    made = trainer.callbacks["islands"]
    assert isinstance(made, IslandsCallback)
    return made.islands.digest, look.seen


@pytest.mark.parametrize(
    "num_ranks, parallel",
    [(1, {}), (2, FSDP)],
    ids=["one process", "FSDP2"],
)
def test_an_island_that_comes_late_ends_with_the_digest_and_the_learning_rate_of_the_run(
    tmp_path: Path, num_ranks: int, parallel: dict[str, Any]
) -> None:
    with swarm(tmp_path, islands=[{}, {"ranks": num_ranks}]) as made:
        made.start(0, lambda config, index: train(config, index, {}))
        until(lambda: rounds(made.config) >= 2, "two rounds alone", made.started[0])
        made.start(1, lambda config, index: train(config, index, parallel))
        for island in made.started:
            island.finish()
        (first, _), (second, seen) = (island.result() for island in made.started)
    assert first == second
    steps = [step for step, _ in seen]
    assert steps == sorted(set(steps)), "it may have missed rounds"
    assert 2 * STEPS < steps[0] < steps[-1] == 5 * STEPS
    assert [lr for _, lr in seen] == pytest.approx([0.1 * step / WARM_UP for step in steps])
