"""Unequal progress: slow islands make fewer inner steps, and steps that missed their round are
kept.
"""

import signal
from pathlib import Path
from statistics import median

import pytest

from tests.faults.waits import assert_one_history, last_round, more_rounds, until
from tests.swarm import Island, swarm

STEPS = 9
STEP_TOKENS = 512


@pytest.mark.slow
def test_a_slow_island_makes_fewer_steps_and_nobody_waits_long(tmp_path):
    islands = [{}, {"faults": ["slow:1x3"]}]
    settings = ["outer.local_steps=dynamic", f"outer.inner_steps={STEPS}", "outer.rounds=30"]
    with swarm(tmp_path, *settings, islands=islands) as made:
        fast, slow = made.start_all()
        for island in (fast, slow):
            island.finish(150)
        rounds = sorted(fast.committed().keys() & slow.committed().keys())[5:]
        steps = {
            island: median(island.committed()[n]["steps"] for n in rounds)
            for island in (fast, slow)
        }
        assert 1 <= steps[slow] <= 0.6 * STEPS and steps[fast] > 0.8 * STEPS, steps
        assert min(record["steps"] for record in slow.committed().values()) >= 1
        # With equal steps it would wait twice as long as it trains.
        step_seconds = median(record["seconds"] for record in fast.records("step"))
        assert median(fast.committed()[n]["wait_seconds"] for n in rounds) < STEPS * step_seconds
        position = {record["round"]: record["tokens"] for record in fast.records("eval")}
        for number in rounds:
            given = [island.committed()[number] for island in (fast, slow)]
            assert all(record["tokens"] == STEP_TOKENS * record["steps"] for record in given)
            assert position[number + 1] - position[number] == sum(
                record["tokens"] for record in given
            ), "weights"
        assert_one_history(fast, slow)


@pytest.mark.slow
def test_no_step_of_a_timed_round_begins_when_its_time_is_up_and_tokens_are_what_was_trained(
    tmp_path,
):
    most, seconds = 1000, 1.0
    settings = [
        "outer.local_steps=timed",
        f"outer.round_seconds={seconds}",
        f"outer.inner_steps={most}",
    ]
    settings += ["outer.quorum=2"]  # Neither is left out because a busy machine makes it late.
    with swarm(
        tmp_path, *settings, "outer.rounds=8", islands=[{}, {"faults": ["slow:1x4"]}]
    ) as made:
        fast, slow = made.start_all()
        for island in (fast, slow):
            island.finish(150)
        for island in (fast, slow):
            steps = list(island.records("step"))
            for number, committed in island.committed().items():
                taken = [
                    record["seconds"] for record in steps if (record["step"] - 1) // most == number
                ]
                assert sum(taken[:-1]) < seconds and committed["steps"] == len(taken) >= 1
                assert committed["tokens"] == STEP_TOKENS * len(taken)
                assert committed["participants"] == ["island-0", "island-1"]
        assert_one_history(fast, slow)


def missed(folder: Path, num_rounds: int, policy: str) -> Island:
    """Island 2 after it missed commits, took the others' state and committed again.

    Island 2 stands still with its steps for round 3 done. The others commit without it until island
    1 stands still, too: then island 0 has no quorum and waits, for as long as island 2 needs.
    """
    faults = ["freeze:2@round=3,phase=plan", f"freeze:1@round={3 + num_rounds},phase=plan"]
    settings = [
        f"outer.missed_progress={policy}",
        "outer.rounds=5000",
        f"outer.inner_steps={STEPS}",
        "outer.quorum=2",
    ]
    with swarm(folder, *settings, islands=[{"faults": faults}] * 3) as made:
        donor, helper, victim = made.start_all()
        until(lambda: helper.is_stopped, "the others go on without it, then stop", *made.started)
        assert victim.is_stopped and last_round(helper) - last_round(victim) == num_rounds
        until(
            lambda: last_round(donor) == last_round(helper),
            "the donor records the same rounds",
            donor,
        )
        victim.signal(signal.SIGCONT)
        until(lambda: last_round(victim) > last_round(helper), "it commits again", *made.started)
        helper.signal(signal.SIGCONT)
        more_rounds(donor, 3, ["island-0", "island-1", "island-2"])
        assert_one_history(*made.started)
    return victim


@pytest.mark.parametrize(
    ("num_rounds", "policy", "is_kept"),
    [
        pytest.param(1, "rebase", True, id="one-rebase", marks=pytest.mark.slow),
        pytest.param(1, "drop", False, id="one-drop", marks=pytest.mark.slow),
        pytest.param(2, "rebase", False, id="two-rebase", marks=pytest.mark.slow),
    ],
)
def test_steps_of_a_missed_commit_are_kept_if_it_was_one_and_the_policy_says_so(
    tmp_path, num_rounds, policy, is_kept
):
    victim = missed(tmp_path, num_rounds, policy)
    (event,) = victim.events("caught up")
    assert event.endswith(f"{STEPS} inner steps {'kept' if is_kept else 'dropped'}")
    first = victim.committed()[3 + num_rounds]
    assert first["participants"] == ["island-0", "island-2"]
    assert (first["steps"] > STEPS) == is_kept, "what was kept counts again"
    assert first["tokens"] == STEP_TOKENS * first["steps"]
