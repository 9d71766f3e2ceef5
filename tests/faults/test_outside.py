"""Random faults from outside, at random times: the healthy islands commit within T, nobody ends,
splits, or is left.

scripts/bench/faults/outside_faults.py makes hundreds, and prints how long each holds up the others.
"""

import os
from pathlib import Path

import pytest

from tests.faults.leftovers import nothing_left
from tests.faults.outside import SHORTAGES, Outcome, OutsideSettings
from tests.faults.outside_runner import run_outside_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_killed_ranks_and_frozen_islands_hold_up_nobody(tmp_path: Path):
    kinds = ("rank", "freeze")
    settings = OutsideSettings(
        "gloo", num_faults=3, seed=2, islands=({}, {"ranks": 2}), kinds=kinds
    )
    with nothing_left():
        check(run_outside_faults(settings, tmp_path))


@pytest.mark.parametrize("transport", ["gloo", "hivemind"])
def test_twenty_faults_of_all_kinds_hold_up_nobody(transport: str, tmp_path: Path):
    with nothing_left():
        check(run_outside_faults(OutsideSettings(transport, num_faults=20, seed=5), tmp_path))


@pytest.mark.parametrize("transport", ["tls", "hivemind"])
def test_islands_that_run_out_of_something_for_some_seconds_train_on_or_are_started_again(
    transport: str, tmp_path: Path
):
    is_apart = os.geteuid() == 0
    settings = OutsideSettings(transport, num_faults=8, seed=3, is_apart=is_apart, kinds=SHORTAGES)
    with nothing_left():
        check(run_outside_faults(settings, tmp_path))


def check(outcome: Outcome) -> None:
    assert outcome.problems == []
    assert all(
        strike.first_commit <= strike.bound for strike in outcome.strikes if strike.first_commit
    )
    assert outcome.account["repeated"] == 0
    assert 0 <= outcome.account["unrecorded"] <= outcome.account["may_be_unrecorded"]
