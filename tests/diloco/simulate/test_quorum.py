"""Islands of one process whose rounds wait for a quorum: stages, kills, and going back to an
earlier state.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account
from diloco.simulate.threads import train_together
from inner.checkpoint.folder import list_published
from tests.faults.waits import assert_one_history
from tests.swarm import GUARD_SECONDS, Island, Work, swarm

NUM_ISLANDS, STEPS = 3, 4
TOKENS = 512
CYCLE = NUM_ISLANDS * STEPS * TOKENS
QUORUM = [
    "outer.transport=loopback",
    "outer.wait_for=quorum",
    "outer.quorum=1",
    f"outer.inner_steps={STEPS}",
]
EACH_CYCLE = ["island.checkpoint.every_rounds=1", "island.checkpoint.keep=20"]
STAGES = [
    {"tokens": 2 * CYCLE},
    {"tokens": CYCLE, "tokens_per_step": TOKENS // 2, "seq_len": 16},
    {"lr": 0.002},
]
SECONDS = {"island-0": 0.05, "island-1": 0.08, "island-2": 0.2}
"""How long an island is held up in each inner step: they contribute to different rounds."""


def slowed(runtime: Runtime) -> None:
    """Let the island make its inner steps at its own pace."""
    runtime.slow_down = lambda seconds: time.sleep(SECONDS[runtime.island.label])


def live_at_own_pace(runtime: Runtime) -> None:
    slowed(runtime)
    life.run(runtime)


def together(config: Config, index: int) -> None:
    train_together(config, live_at_own_pace)


def run(folder: Path, *settings: str, works: list[Work]) -> list[Island]:
    """The islands of a run in one process, which is started once for each work; all but the last
    are killed.
    """
    with swarm(folder, *QUORUM, *settings, islands=[{"ranks": 1}] * NUM_ISLANDS) as made:
        for work in works[:-1]:
            assert made.start(0, work).wait() == [-signal.SIGKILL]
        process = made.start(0, works[-1])
        process.finish(4 * GUARD_SECONDS)
        return [
            Island(process.folder.parent / f"island-{index}", process.ranks)
            for index in range(NUM_ISLANDS)
        ]


def die_in_step(steps: int) -> Work:
    """Kill the process when the slowest island has made so many inner steps."""

    def live(runtime: Runtime) -> None:
        slowed(runtime)
        made = [0]

        def die(seconds: float) -> None:
            time.sleep(SECONDS[runtime.island.label])
            made[0] += 1
            if made[0] == steps and threading.current_thread().name == "island-2":
                os.kill(os.getpid(), signal.SIGKILL)

        runtime.slow_down = die
        life.run(runtime)

    return lambda config, index: train_together(config, live)


def saved_rounds(island: Island) -> dict[int, str]:
    """The digests of the states that the island has saved, by number of committed rounds."""
    found = [saved.facts["outer"] for saved in list_published(island.folder / "checkpoints")[0]]
    return {facts["position"]["round"]: facts["digest"] for facts in found}


def border_units(island: Island) -> dict[str, str]:
    """The first unit of each stage that the island has begun, by the stage's number."""
    texts = [text.split(":")[0].split(" of 3 from unit ") for text in island.events("stage")]
    return dict(texts)


def check_stages(islands: list[Island]) -> None:
    """Check that all islands hold one history and began each stage behind the same unit, on its
    text.
    """
    assert_one_history(*islands)
    units = [border_units(island) for island in islands]
    assert units[0] == units[1] == units[2]
    assert list(units[0]) == ["1", "2", "3"]
    account = data_account(read_run(islands[0].folder.parent).islands)
    assert account["units_repeated"] == 0


def test_islands_of_unequal_pace_change_the_stage_with_the_same_commit(tmp_path: Path) -> None:
    islands = run(tmp_path, f"stages={json.dumps(STAGES)}", "outer.rounds=6", works=[together])
    check_stages(islands)
    given = [
        {number for number, r in island.committed().items() if r["tokens"]} for island in islands
    ]
    assert given[0] != given[2], "they contributed to different rounds"
    last = max(islands[0].committed())
    assert {island.committed()[last]["digest"] for island in islands} == {
        islands[0].committed()[last]["digest"]
    }


@pytest.mark.slow
def test_killed_and_started_again_in_a_stage_they_end_in_one_state_and_read_no_unit_twice(
    tmp_path: Path,
) -> None:
    settings = [*EACH_CYCLE, f"stages={json.dumps(STAGES)}", "outer.rounds=6"]
    islands = run(tmp_path, *settings, works=[die_in_step(9), together])
    assert all(island.events("resumed") for island in islands)
    assert_one_history(*islands)
    assert [list(border_units(island))[-1] for island in islands] == ["3"] * 3
    account = data_account(read_run(islands[0].folder.parent).islands)
    assert account["units_repeated"] == 0


def poison(runtime: Runtime) -> None:
    """The first island's params become huge, and stay finite, once: its next contribution has
    them.
    """
    slowed(runtime)
    make_step = runtime.trainer.step
    has_broken = [False]

    def step(micro_batches):
        result = make_step(micro_batches)
        if not has_broken[0] and runtime.outer.position.tokens >= 3 * CYCLE:
            has_broken[0] = True
            for part in runtime.trainer.model_parts:
                for param in part.parameters():
                    param.data.fill_(1e30)
        return result

    if runtime.island.label == "island-0":
        runtime.trainer.step = step
    life.run(runtime)


def test_broken_losses_go_back_together_to_the_last_state_with_finite_losses(
    tmp_path: Path,
) -> None:
    limits = ["optimizer.max_skipped_steps=2", "outer.merge.refuse_norm_ratio=null"]
    settings = [*EACH_CYCLE, *limits, "outer.rounds=7", "evaluate.every_rounds=7"]
    islands = run(tmp_path, *settings, works=[lambda config, index: train_together(config, poison)])
    assert_one_history(*islands)
    went = [island.events("went back") for island in islands]
    assert sum(map(len, went)) >= 2 and max(map(len, went)) == 1, went
    assert len(set().union(*went)) == 1, "to the same state"
    for island in islands:
        losses = [record["loss"] for record in island.records("step")]
        assert None in losses
        assert None not in losses[-STEPS:]
    common = set.intersection(*[{*saved_rounds(island).items()} for island in islands])
    assert common, "they have saved the same states"
