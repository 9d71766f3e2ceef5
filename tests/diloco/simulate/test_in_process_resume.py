"""Islands of one process that were killed go on from their checkpoints as if they had never
stopped.
"""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.simulate.in_process import configure_in_process
from diloco.simulate.threads import train_together
from inner.checkpoint.folder import list_published
from tests.swarm import Island, swarm

EACH_ROUND = ["island.checkpoint.every_rounds=1", "outer.rounds=6", "outer.inner_steps=4"]
LAST_ROUND = 5
PLAIN = ["outer.codec=int8"]
STREAMED = [
    "outer.fragments=2",
    "outer.delay=1",
    "outer.mix=0.5",
    "outer.codec=stat2",
    "outer.coding.feedback=0.9",
]
LATE = ["outer.delay=4"]
"""A round lands at the last inner step of the next one, and is saved there."""
MOMENTS = ["outer.optimizer={lr: 0.7, momentum: 0.9, nesterov: true}", "outer.moments=[1, 2]"]
GOSSIP = ["outer.gossip={}"]


def numbers(folder: Path) -> tuple[Any, ...]:
    """What an island has recorded last of each step, evaluation and committed round."""
    island = Island(folder, [])
    losses = {record["step"]: (record["loss"], record["lr"]) for record in island.records("step")}
    evals = {record["round"]: record["loss"] for record in island.records("eval")}
    rounds = {
        number: (record["digest"], record["steps"]) for number, record in island.committed().items()
    }
    return losses, evals, rounds


def train(
    folder: Path, settings: list[str], num_islands: int, kill_at: int | None, lose: bool = False
) -> list[Path]:
    """Folders of the islands after a run in one process, which is killed in inner step `kill_at`
    and started again.

    With `lose`, the newest checkpoint of the first island is gone then.
    """

    def live(parts: Runtime) -> None:
        made = [0]

        def die(seconds: float) -> None:
            made[0] += 1
            if made[0] == kill_at and threading.current_thread().name == "island-0":
                assert parts.checkpoints is not None
                parts.checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)

        parts.slow_down = die
        life.run(parts)

    def first(config: Config, index: int) -> None:
        train_together(config, live)

    def again(config: Config, index: int) -> None:
        train_together(config)

    with swarm(folder, *EACH_ROUND, *settings, islands=[{"ranks": 1}] * num_islands) as made:
        config = configure_in_process(made.config, has_disturbances=False)
        process = made.start(0, first, config)
        folders = [process.folder.parent / f"island-{index}" for index in range(num_islands)]
        if kill_at is not None:
            assert process.wait() == [-signal.SIGKILL]
            if lose:
                newest, *_ = list_published(folders[0] / "checkpoints")[0]
                shutil.rmtree(newest.path)
            process = made.start(0, again, config)
        process.finish()
    return folders


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.slow),
        pytest.param(STREAMED, id="streamed, feedback"),
        pytest.param(MOMENTS, id="Nesterov, moments", marks=pytest.mark.slow),
        pytest.param(LATE, id="late"),
        pytest.param(GOSSIP, id="gossip", marks=pytest.mark.slow),
    ],
)
def test_islands_killed_in_a_round_end_as_if_nothing_had_been(
    tmp_path: Path, settings: list[str]
) -> None:
    whole = train(tmp_path / "whole", settings, 2, None)
    broken = train(tmp_path / "broken", settings, 2, kill_at=14)
    for one, other in zip(whole, broken, strict=True):
        assert Island(other, []).events("resumed")
        assert numbers(one) == numbers(other)
    assert LAST_ROUND in numbers(whole[0])[2]


def test_islands_whose_newest_checkpoints_are_of_different_steps_resume_from_the_last_they_share(
    tmp_path: Path,
) -> None:
    whole = train(tmp_path / "whole", PLAIN, 3, None)
    broken = train(tmp_path / "broken", PLAIN, 3, kill_at=14, lose=True)
    assert [Island(folder, []).events("resumed") for folder in broken] == [
        ["inner step 8, round 2"]
    ] * 3
    assert [numbers(folder) for folder in broken] == [numbers(folder) for folder in whole]
