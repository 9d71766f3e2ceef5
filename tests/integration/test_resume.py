"""An island that was killed goes on from its checkpoint as if it had never stopped, bit for bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco import island as life
from diloco.assemble import Parts
from diloco.config import Config
from diloco.train import train
from tests.swarm import Island, Work, swarm

EACH_ROUND = ["island.checkpoint.every_rounds=1", "outer.rounds=6", "outer.inner_steps=4"]
LAST = 5
STREAMED = ["outer.fragments=2", "outer.delay=1", "outer.mix=0.5"]
LOSSY = ["outer.codec=stat2", "outer.coding.feedback=0.9"]


def killed_after(steps: int) -> Work:
    """Train, until the process is killed in its inner step number `steps`, before anybody hears of it."""

    def work(config: Config, index: int) -> None:
        def live(parts: Parts) -> None:
            made = [0]

            def die(seconds: float) -> None:
                made[0] += 1
                if made[0] == steps:
                    # What has been saved is on the disk, however fast steps are made here.
                    if parts.checkpoints is not None:
                        parts.checkpoints.wait()
                    os.kill(os.getpid(), signal.SIGKILL)

            parts.slow_down = die
            life.run(parts)

        train(config, index, live)

    return work


def losses(island: Island) -> dict[int, float]:
    """By inner step, as last recorded."""
    return {record["step"]: record["loss"] for record in island.records("step")}


def trained(folder: Path, *settings: str, ranks: int = 1, start: Callable[[Any], list[Island]]) -> list[Island]:
    islands = [{"ranks": ranks}, {}]
    with swarm(folder, *EACH_ROUND, *settings, islands=islands) as made:
        found = start(made)
        for island in found:
            island.finish()
        return found


def stopped_and_resumed(steps: int) -> Callable[[Any], list[Island]]:
    def start(made: Any) -> list[Island]:
        for island in made.start_all(killed_after(steps)):
            assert -signal.SIGKILL in island.wait()
        return made.start_all()

    return start


@pytest.mark.parametrize("settings", [[], STREAMED, LOSSY], ids=["plain", "streamed", "feedback"])
def test_two_islands_killed_in_a_round_end_as_if_nothing_had_been(tmp_path: Path, settings: list[str]) -> None:
    whole = trained(tmp_path / "whole", *settings, start=lambda made: made.start_all())
    broken = trained(tmp_path / "broken", *settings, start=stopped_and_resumed(14))
    for one, other in zip(whole, broken, strict=True):
        assert other.events("resumed")
        assert losses(one) == losses(other)
    last = max(whole[0].committed())
    assert {i.committed()[last]["digest"] for i in [*whole, *broken]} == {whole[0].committed()[last]["digest"]}
