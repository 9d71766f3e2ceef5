"""Several islands under Lightning's Trainer, and an island of several processes."""

from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch", reason="needs the package lightning")

from lightning.pytorch.callbacks import ModelCheckpoint

from diloco.config.schema import Config
from diloco.trainers.lightning import IslandsCallback
from tests.diloco.own_loop.loops import STEPS, folder_of, own_config
from tests.diloco.own_loop.test_coming_back import RUN, begin, rounds
from tests.diloco.trainers.small_lightning import Small, StopAt, fit, share
from tests.faults.waits import until
from tests.swarm import read_records, swarm

pytestmark = pytest.mark.slow


def come(config: Config, index: int) -> list[tuple[int, float]]:
    islands = IslandsCallback(own_config(config, index, {"joins": True}, **RUN), tokens=len)
    return fit(folder_of(config, index), islands, model=Small(seed=1), limit_val_batches=0).seen


def test_an_island_that_comes_late_goes_on_at_the_step_and_the_learning_rate_of_the_run(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, islands=[{}, {}]) as made:
        made.start(0, begin)
        until(lambda: rounds(made.config) >= 2, "two rounds alone", made.started[0])
        second = made.start(1, come)
        for island in made.started:
            island.finish()
        seen = second.result()
    steps = [step for step, _ in seen]
    assert steps == sorted(set(steps)), "it may have missed rounds"
    assert 2 * STEPS <= steps[0] < steps[-1] == 5 * STEPS - 1
    assert [lr for _, lr in seen] == pytest.approx([share(step) for step in steps])


def train_on_ranks(config: Config, index: int) -> tuple[str, str, list[float]]:
    """Train whole, and again from a checkpoint in the second round. Returns both digests and the
    first losses.
    """
    folder = folder_of(config, index).parent / "saved"
    settings = {
        "strategy": "ddp",
        "devices": 2,
        "enable_checkpointing": True,
        "limit_val_batches": 0,
    }
    digests, losses = [], []
    for name, resume in (("whole", None), ("again", folder / "step=3.ckpt")):
        islands = IslandsCallback(own_config(config, index, delay=1), tokens=len)
        save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        model = fit(
            folder / name,
            islands,
            *([save] if resume is None else []),
            ckpt_path=resume,
            **settings,
        )
        digests.append(islands.islands.digest)
        losses.append(model.losses)
    assert losses[1] == losses[0][3:]
    return digests[0], digests[1], losses[0]


def test_an_island_of_two_processes_resumes_from_the_checkpoint_of_its_trainer(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, islands=[{"ranks": 2}]) as made:
        island = made.start(0, train_on_ranks)
        island.finish()
        whole, again, losses = island.result()
    assert again == whole
    assert len(losses) == 6


def stop_at_four(config: Config, index: int) -> None:
    islands = IslandsCallback(own_config(config, index), tokens=len)
    fit(folder_of(config, index), islands, StopAt(4), limit_val_batches=0)


def test_a_trainer_that_ends_first_leaves_the_run(tmp_path: Path) -> None:
    with swarm(tmp_path, islands=[{}]) as made:
        island = made.start(0, stop_at_four)
        island.finish()
    events = [
        each
        for each in read_records(folder_of(made.config, 0) / "metrics.jsonl")
        if each["kind"] == "event"
    ]
    assert events[-1]["text"].startswith("the loop leaves; 2 rounds are done")
