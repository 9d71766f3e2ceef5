"""Unequal progress: fewer inner steps on slow islands, and what becomes of steps whose round went on without them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from diloco.fault_spec import parse_fault
from diloco.faults import FOLDER, begin
from tests.faults.waits import assert_one_history, last_round, until
from tests.swarm import Island, Swarm, swarm

STEPS = 9
STEP_TOKENS = 512


def test_a_slow_island_makes_fewer_steps_and_nobody_waits_long(tmp_path):
    islands = [{}, {"faults": ["slow:1x3"]}]
    settings = ["outer.local_steps=dynamic", f"outer.inner_steps={STEPS}", "outer.rounds=30"]
    with swarm(tmp_path, *settings, islands=islands) as made:
        fast, slow = made.start_all()
        for island in (fast, slow):
            island.finish(150)
        rounds = sorted(fast.committed().keys() & slow.committed().keys())[5:]
        steps = {island: median(island.committed()[n]["steps"] for n in rounds) for island in (fast, slow)}
        assert 1 <= steps[slow] <= 0.6 * STEPS and steps[fast] > 0.8 * STEPS, steps
        assert min(record["steps"] for record in slow.committed().values()) >= 1
        # With equal steps it would wait twice as long as it trains.
        step_seconds = median(record["seconds"] for record in fast.records("step"))
        assert median(fast.committed()[n]["wait_seconds"] for n in rounds) < STEPS * step_seconds
        position = {record["round"]: record["tokens"] for record in fast.records("eval")}
        for number in rounds:
            given = [island.committed()[number] for island in (fast, slow)]
            assert all(record["tokens"] == STEP_TOKENS * record["steps"] for record in given)
            assert position[number + 1] - position[number] == sum(record["tokens"] for record in given), "weights"
        assert_one_history(fast, slow)


@contextmanager
def frozen_in_a_round(folder: Path, policy: str) -> Iterator[tuple[Swarm, Island]]:
    """Island 2 has given steps to round 3, stands still before the plan, and the others' rounds now take seconds."""
    islands = [{"faults": ["freeze:2@round=3,phase=plan"]}] * 3
    settings = [f"outer.missed_progress={policy}", "outer.rounds=5000", "outer.inner_steps=4"]
    with swarm(folder, *settings, islands=islands) as made:
        for i in range(3):
            (folder / "test" / f"island-{i}" / FOLDER).mkdir(parents=True)
        victim = made.start_all()[2]
        until(lambda: victim.is_stopped, "the victim stands still", victim)
        for i, island in enumerate(made.started):
            begin(island.folder, parse_fault(f"slow:{i}x50@round=3,seconds=600"))
        yield made, victim


def wake_after(made: Swarm, victim: Island, missed: int) -> int:
    """Wake it when the others have committed so many rounds without it; the round in which it was."""
    was_in = last_round(victim) + 1
    until(lambda: last_round(made.started[0]) >= was_in + missed - 1, f"{missed} rounds without it", *made.started)
    victim.signal(signal.SIGCONT)
    until(lambda: victim.events("caught up"), "it takes the others' state", *made.started)
    return was_in


@pytest.mark.parametrize("policy", ["rebase", pytest.param("drop", marks=pytest.mark.slow)])
def test_steps_of_one_missed_commit_are_kept_or_dropped_as_the_policy_says(tmp_path, policy):
    with frozen_in_a_round(tmp_path, policy) as (made, victim):
        was_in = wake_after(made, victim, 1)
        assert victim.events("caught up")[0].endswith("kept" if policy == "rebase" else "dropped")
        until(lambda: last_round(victim) > was_in, "it commits again", *made.started)
        first = victim.committed()[was_in + 1]
        assert first["participants"] == ["island-0", "island-1", "island-2"]
        assert (first["steps"] > 4) == (policy == "rebase"), "what was kept counts again"
        assert_one_history(*made.started)


@pytest.mark.slow
def test_steps_of_more_missed_commits_are_dropped(tmp_path):
    with frozen_in_a_round(tmp_path, "rebase") as (made, victim):
        wake_after(made, victim, 2)
        assert victim.events("caught up")[0].endswith("4 inner steps dropped")
        until(lambda: last_round(victim) > 3, "it commits again", *made.started)
        assert_one_history(*made.started)
