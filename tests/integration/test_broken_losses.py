"""An island whose losses stop being finite goes on from a checkpoint from before that."""

from pathlib import Path

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.train import train
from inner.checkpoint.folder import list_published
from tests.swarm import swarm

STEPS, ROUNDS, POISONED_STEP = 2, 8, 6
SETTINGS = [f"outer.inner_steps={STEPS}", f"outer.rounds={ROUNDS}", "island.checkpoint.every_rounds=1"]


def poisoned(config: Config, index: int) -> None:
    """The params become huge, and stay finite, after the last inner step of the third round: its commit has them."""

    def live(parts: Runtime) -> None:
        make_step = parts.trainer.step

        def step(micro_batches):
            result = make_step(micro_batches)
            if result.step == POISONED_STEP:
                for stage in parts.trainer.stages:
                    for param in stage.parameters():
                        param.data.fill_(1e30)
            return result

        parts.trainer.step = step
        life.run(parts)

    train(config, index, live)


def test_an_island_resumes_from_before_its_losses_were_broken_and_says_so(tmp_path: Path) -> None:
    limit = "optimizer.max_skipped_steps=5"
    with swarm(tmp_path, *SETTINGS, limit, "island.checkpoint.keep=1", islands=[{}]) as made:
        island = made.start(0, poisoned)
        assert island.wait() == [1]
        names = [each.path.name for each in list_published(island.folder / "checkpoints")[0]]
        assert names == ["step-00000006", "step-00000004"], "none is saved while losses are broken, a good one is left"
        assert any("no loss has been finite since inner step 6" in text for text in island.events("not saved"))
        (rejected,) = island.events("rejected")
        assert rejected.startswith("step-00000006: no loss has been finite since inner step 6; the island goes on from")
        made.start(0).finish()
        assert island.events("resumed")[-1].startswith("inner step 4, round 2")
        assert max(island.committed()) == ROUNDS - 1
        assert all(record["loss"] is not None for record in island.records("step")[-2 * STEPS :])
