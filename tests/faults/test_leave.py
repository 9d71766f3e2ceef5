"""SIGTERM ends an island within seconds, with a goodbye, whatever it is doing. The others go on at
once.
"""

import signal
import time

import pytest

from tests.faults.waits import assert_one_history, last_round, more_rounds, reached, until
from tests.swarm import Island, Swarm, swarm

LEAVER = 2
LEFT = ["island-0", "island-1"]
STOPPED = 128 + signal.SIGTERM
END_SECONDS = 60.0
"""A process ends about 5 s after SIGTERM at most. This limit is for a busy machine."""
transports = pytest.mark.parametrize(
    "transport", ["gloo", pytest.param("hivemind", marks=pytest.mark.slow)]
)


def settings(name: str, transport: str) -> list[str]:
    return [
        "outer.rounds=5000",
        "outer.inner_steps=4",
        f"outer.transport={transport}",
        f"name={name}",
    ]


def check_left(made: Swarm, leaver: Island, asked: float) -> None:
    """Check that the signal ended the island, it said goodbye, and the others go on without many
    aborted attempts.
    """
    assert leaver.wait(END_SECONDS) == [STOPPED]
    others = made.started[:2]
    for other in others:
        more_rounds(other, 3, LEFT)
        assert "island-2 has left the run" in other.log, "its goodbye was heard"
        aborted = [
            record
            for record in other.records("round")
            if not record["committed"] and record["time"] > asked
        ]
        assert len(aborted) <= 2, f"attempts aborted after it left: {aborted}"
    assert leaver.records("event")[-1]["name"] == "left"
    assert_one_history(*made.started)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_an_island_stopped_while_it_trains_is_gone_at_once(tmp_path, place, transport):
    # Its steps are long, so that the signal arrives in the middle of them.
    islands = [{"faults": ["slow:2x20"]}] * 3
    with swarm(
        tmp_path, *settings(tmp_path.name, transport), islands=islands, address=place(transport)
    ) as made:
        *_, leaver = made.start_all()
        for island in made.started:
            reached(island, 3)
        steps = len(leaver.records("step"))
        until(lambda: len(leaver.records("step")) > steps, "one more step", leaver)
        asked = time.time()
        leaver.signal(signal.SIGTERM)
        check_left(made, leaver, asked)


@transports
@pytest.mark.parametrize("phase", ["reducing", pytest.param("decide", marks=pytest.mark.slow)])
def test_an_island_stopped_in_the_middle_of_a_round_is_gone_at_once(
    tmp_path, place, transport, phase
):
    islands = [{"faults": [f"freeze:{LEAVER}@round=3,phase={phase}"]}] * 3
    with swarm(
        tmp_path, *settings(tmp_path.name, transport), islands=islands, address=place(transport)
    ) as made:
        *others, leaver = made.start_all()
        until(lambda: leaver.is_stopped, "the moment in the round", leaver)
        asked, last = time.time(), max(last_round(other) for other in others)
        leaver.signal(signal.SIGTERM)
        leaver.signal(signal.SIGCONT)
        check_left(made, leaver, asked)
        assert all(set(range(last)) <= set(other.committed()) for other in others)
