"""Loss spikes in islands of one process: what a rewind does, what is noted, and that a resumed run
sees the same.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco import island as life
from diloco.assemble import Runtime
from diloco.config.schema import Config
from diloco.simulate.in_process import configure_in_process
from diloco.simulate.threads import train_together
from tests.swarm import Island, swarm

# Many losses are above the mean of the two before them.
MANY = "optimizer.spikes={steps: 2, deviations: 0.01, action: %s}"
SHORT = [
    "outer.rounds=3",
    "outer.inner_steps=4",
    "optimizer.lr=0.1",
    "outer.codec=int8",
    "island.checkpoint.every_rounds=1",
]
KILL_AT = 7


def train(folder: Path, action: str, *, is_killed: bool = False) -> list[Island]:
    """The islands of a run in one process, which may be killed in inner step KILL_AT and started
    again.
    """

    def live(parts: Runtime) -> None:
        made = [0]

        def die(seconds: float) -> None:
            made[0] += 1
            if made[0] == KILL_AT and threading.current_thread().name == "island-0":
                assert parts.checkpoints is not None
                parts.checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)

        parts.slow_down = die
        life.run(parts)

    def work(how: Callable[[Runtime], None] | None) -> Callable[[Config, int], None]:
        return lambda config, index: train_together(config, *([how] if how else []))

    with swarm(folder, *SHORT, MANY % action, islands=[{"ranks": 1}] * 2) as made:
        config = configure_in_process(made.config, has_disturbances=False)
        process = made.start(0, work(live if is_killed else None), config)
        if is_killed:
            assert process.wait() == [-signal.SIGKILL]
            process = made.start(0, work(None), config)
        process.finish()
        return [Island(process.folder.parent / f"island-{index}", []) for index in range(2)]


def numbers(island: Island) -> dict[int, Any]:
    """Loss, spike and fate of each inner step, as last recorded."""
    return {
        record["step"]: (record["loss"], record["spike"], record["skipped"])
        for record in island.records("step")
    }


def digests(island: Island) -> list[str]:
    return [record["digest"] for record in island.committed().values()]


@pytest.fixture(scope="module")
def rewound(tmp_path_factory: pytest.TempPathFactory) -> list[Island]:
    return train(tmp_path_factory.mktemp("rewound"), "rewind")


def test_a_spike_is_recorded_and_noted_in_the_logbook(rewound: list[Island]):
    spikes = {step for step, (_, spike, _) in numbers(rewound[0]).items() if spike is not None}
    events = [
        record["text"] for record in rewound[0].records("event") if record["name"] == "loss spike"
    ]
    assert 0 < len(spikes) == len(events)
    assert all("went on from the global params" in text for text in events)
    assert (rewound[0].folder.parent / "LOGBOOK.md").read_text().count(
        "**island-0** loss spike"
    ) == len(spikes)


def test_islands_agree_after_rewinds_and_end_elsewhere_than_after_skips(
    rewound: list[Island], tmp_path: Path
):
    skipped = train(tmp_path, "skip")
    for islands in (rewound, skipped):
        assert len(digests(islands[0])) == 3 and digests(islands[0]) == digests(islands[1])
    assert digests(rewound[0])[-1] != digests(skipped[0])[-1]


@pytest.mark.slow
def test_a_killed_run_notices_the_same_spikes(rewound: list[Island], tmp_path: Path):
    again = train(tmp_path, "rewind", is_killed=True)
    assert [numbers(island) for island in again] == [numbers(island) for island in rewound]
    assert digests(again[0]) == digests(rewound[0])
