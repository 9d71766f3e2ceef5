"""Islands wake up behind one that dies while they take its state: they go on from their own. Real
processes.
"""

import signal

import pytest

from tests.faults.waits import GUARD_SECONDS, assert_one_history, more_rounds, reached
from tests.swarm import swarm

AHEAD, FROZEN = 0, (1, 2)
SETTINGS = ("outer.rounds=100000", "outer.inner_steps=4", "evaluate.every_rounds=100000")
QUORUM = ("outer.wait_for=quorum", "outer.optimizer.delayed=true")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), QUORUM], ids=["all", "quorum"])
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_islands_that_wake_behind_one_that_dies_giving_its_state_go_on(
    tmp_path, place, transport, settings
):
    islands = [{"faults": [f"slow:{index}x5"]} for index in range(3)]
    islands[AHEAD]["faults"].append(f"kill:{AHEAD}@round=4,phase=donate")
    settings = [*SETTINGS, *settings, f"outer.transport={transport}", f"name={tmp_path.name}"]
    with swarm(tmp_path, *settings, islands=islands, address=place(transport)) as made:
        for island in made.start_all():
            reached(island, 3)
        ahead, frozen = made.started[AHEAD], [made.started[index] for index in FROZEN]
        for island in frozen:
            island.signal(signal.SIGSTOP)
        more_rounds(ahead, 2, ["island-0"])
        for island in frozen:
            island.signal(signal.SIGCONT)
        assert ahead.wait(GUARD_SECONDS) == [-signal.SIGKILL]
        for island in frozen:
            more_rounds(island, 3, ["island-1", "island-2"])
        assert_one_history(*frozen)
