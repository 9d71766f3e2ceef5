"""Islands whose losses stop being finite go on from a state from before that."""

from math import nan
from pathlib import Path

from torch import Tensor

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.island_duties.going_back import MOST_OFFERS, MOST_RETURNS
from diloco.train import train
from inner.data.micro_batch import MicroBatch
from tests.swarm import Island, swarm

FSDP2 = {"ranks": 2}
STEPS, ROUNDS, POISONED_STEP = 2, 12, 6
SETTINGS = [
    f"outer.inner_steps={STEPS}",
    f"outer.rounds={ROUNDS}",
    "island.checkpoint.every_rounds=1",
]


def poisoned(config: Config, index: int) -> None:
    """The params become huge, and stay finite, after the last inner step of the third round: its
    commit has them.
    """

    def live(parts: Runtime) -> None:
        make_step = parts.trainer.step

        def step(micro_batches):
            result = make_step(micro_batches)
            if result.step == POISONED_STEP:
                for stage in parts.trainer.model_parts:
                    for param in stage.parameters():
                        param.data.fill_(1e30)
            return result

        parts.trainer.step = step
        life.run(parts)

    train(config, index, live)


def events_of(islands: list[Island], name: str) -> list[list[str]]:
    return [island.events(name) for island in islands]


def test_islands_go_back_together_to_the_last_state_with_finite_losses_and_finish_the_run(
    tmp_path: Path,
) -> None:
    limits = ["optimizer.max_skipped_steps=5", "outer.merge.refuse_norm_ratio=null"]
    with swarm(tmp_path, *SETTINGS, *limits, islands=[{}, FSDP2, {}]) as made:
        islands = [made.start(index, poisoned if index == 1 else train) for index in range(3)]
        for island in islands:
            island.finish()
        back = "to the state of round 2; text read since then is not read again"
        assert events_of(islands, "went back") == [[back]] * 3
        assert events_of(islands, "resumed") == [[]] * 3, "no island was started again"
        commits = [island.committed() for island in islands]
        digests = [
            {number: record["digest"] for number, record in made.items()} for made in commits
        ]
        assert digests[0] == digests[1] == digests[2]
        assert sorted(commits[0]) == list(range(ROUNDS)), "the numbers of rounds go on"
        for island in islands:
            losses = [record["loss"] for record in island.records("step")]
            assert None in losses
            assert None not in losses[-2 * STEPS :]
            assert island.events("account")[0].startswith(
                f"{3 * STEPS * ROUNDS} units of text trained"
            )


def test_one_island_whose_losses_alone_are_broken_ends_and_comes_back_from_before_that(
    tmp_path: Path,
) -> None:
    settings = ["optimizer.max_skipped_steps=1", "outer.rounds=40"]
    with swarm(tmp_path, *SETTINGS[:1], *SETTINGS[2:], *settings, islands=[{}, {}]) as made:
        others = made.start(0)
        broken = made.start(1, never_finite)
        assert broken.wait() == [1]
        offers = broken.events("offers to go back")
        assert len(offers) == MOST_OFFERS
        assert not broken.events("went back"), "one of two is no majority"
        made.start(1).finish()
        others.finish()
        assert others.committed()[39]["digest"] == broken.committed()[39]["digest"]


def test_an_island_that_has_gone_back_three_times_ends_and_can_be_started_again(
    tmp_path: Path,
) -> None:
    settings = ["optimizer.max_skipped_steps=1", "outer.rounds=40"]
    with swarm(
        tmp_path, *SETTINGS[:1], *SETTINGS[2:], *settings, "island.checkpoint.keep=1", islands=[{}]
    ) as made:
        island = made.start(0, never_finite)
        assert island.wait() == [1]
        assert len(island.events("went back")) == MOST_RETURNS
        made.start(0).finish()
        assert max(island.committed()) == 39
        assert all(record["loss"] is not None for record in island.records("step")[-2 * STEPS :])


def never_finite(config: Config, index: int) -> None:
    """From inner step 6 on each loss is broken, whatever the params are: as on a device that
    computes wrongly.
    """

    def live(parts: Runtime) -> None:
        backward = parts.trainer._backward

        def broken(batches: list[MicroBatch], num_tokens: Tensor) -> Tensor:
            loss = backward(batches, num_tokens)
            return loss * nan if parts.trainer.inner_step > POISONED_STEP else loss

        parts.trainer._backward = broken
        life.run(parts)

    train(config, index, live)
