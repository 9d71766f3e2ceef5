"""Seeded storms of mixed faults over real islands: a committed round is the same everywhere, little
work is lost.
"""

from pathlib import Path

import pytest

from tests.faults.cases import SHAPES
from tests.faults.storm import StormOutcome, StormSettings, run_storm

LEAST_SHARE = 0.95
"""Least share of inner steps whose progress must reach a committed round."""

RATE = 5.0
"""Faults an island and minute: 25 a minute on five islands, each hit every 12 s, so that it comes
back in between.
"""


def test_a_short_storm_leaves_one_state_in_every_round(tmp_path: Path):
    check(run_storm(StormSettings("gloo", num_islands=3, num_faults=6, rate=25, seed=16), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_fifty_faults_leave_one_state_in_every_round_and_lose_little(
    transport: str, tmp_path: Path
):
    outcome = run_storm(StormSettings(transport, num_islands=5, num_faults=50, rate=RATE), tmp_path)
    check(outcome)
    assert len(outcome.summary["faults"]) >= 4, "mixed kinds"
    assert outcome.summary["committed_share"] >= LEAST_SHARE


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_islands_of_several_ranks_come_through_a_storm(transport: str, tmp_path: Path):
    # A busy machine makes an island of four ranks slow: its steps take as long as those of one rank
    # all the same.
    setting = StormSettings(
        transport,
        num_islands=4,
        num_faults=20,
        rate=2,
        seed=3,
        shapes=tuple(SHAPES.values()),
        step_seconds=0.5,
    )
    check(run_storm(setting, tmp_path))


def check(outcome: StormOutcome) -> None:
    """Check that every committed round has one result. `run_storm` ends when all islands train
    whole rounds again.
    """
    assert outcome.summary["rounds_committed"] > 0
    assert outcome.summary["rounds_disagreeing"] == []
