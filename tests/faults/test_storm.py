"""Seeded storms of mixed faults over real islands: a committed round is the same everywhere, little work is lost."""

from pathlib import Path

import pytest

from tests.faults.storm import StormOutcome, StormSettings, run_storm

LEAST_SHARE = 0.9
"""Least share of inner steps whose progress must reach a committed round."""


def test_a_short_storm_leaves_one_state_in_every_round(tmp_path: Path):
    check(run_storm(StormSettings("gloo", num_islands=3, num_faults=6, rate=25, seed=16), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_fifty_faults_leave_one_state_in_every_round_and_lose_little(transport: str, tmp_path: Path):
    outcome = run_storm(StormSettings(transport, num_islands=5, num_faults=50, rate=5), tmp_path)
    check(outcome)
    assert len(outcome.summary["faults"]) >= 4, "mixed kinds"
    assert outcome.summary["committed_share"] >= LEAST_SHARE


def check(outcome: StormOutcome) -> None:
    """Check that every committed round has one result. `run_storm` ends when all islands train whole rounds again."""
    assert outcome.summary["rounds_committed"] > 0
    assert outcome.summary["rounds_disagreeing"] == []
