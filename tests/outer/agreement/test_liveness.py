"""Honest islands that are connected commit within a bound, whatever a minority says, while others
freeze and die.
"""

import random

import pytest

from tests.outer.habits import HABITS, WITH_A_QUORUM, Habit, false_commits
from tests.outer.lies import Run, new_run, seconds_until
from tests.outer.protocols import WAYS

BOUND = 60
"""Seconds for a round. A vote is late after 4 and given up after 6, and a planner is passed over
after 3.
"""
SLOW = pytest.mark.slow


def commit_rounds(run: Run, rounds: int = 3) -> None:
    for number in range(1, rounds + 1):
        assert seconds_until(run, number, BOUND) < BOUND, f"round {number}"
        assert not run.gave_up
        assert not run.fooled


@pytest.mark.parametrize("names", ["abc", pytest.param("abcde", marks=SLOW)])
@pytest.mark.parametrize("habit", WITH_A_QUORUM, ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("ways", WAYS)
def test_whatever_one_island_does_all_the_time_the_others_commit(
    ways: dict[str, int], habit: Habit, names: str
) -> None:
    for liar in (names[0], names[-1]):
        quorum = len(names) // 2 + 1
        commit_rounds(new_run(names, {liar: [habit]}, seed=1, quorum=quorum, **ways))


@pytest.mark.parametrize("num_seeds", [12, pytest.param(150, marks=SLOW)])
@pytest.mark.parametrize("names,quorum", [("abc", 1), ("abc", 2), ("abcd", 3)])
@pytest.mark.parametrize("ways", WAYS)
def test_whatever_mixture_of_lies_one_island_tells_the_others_commit(
    ways: dict[str, int], names: str, quorum: int, num_seeds: int
) -> None:
    for seed in range(num_seeds):
        chance = random.Random(seed)
        liars = {chance.choice(names): chance.sample(HABITS if quorum == 1 else WITH_A_QUORUM, 3)}
        commit_rounds(new_run(names, liars, seed, quorum=quorum, **ways))


def test_no_plan_is_committed_here_and_aborted_there_because_an_island_says_so() -> None:
    for seed in range(20):
        run = new_run("abcd", {random.Random(seed).choice("abcd"): [false_commits]}, seed, quorum=3)
        commit_rounds(run)
        assert all(len(outcomes) == 1 for outcomes in run.outcomes.values()), f"seed {seed}"


@pytest.mark.parametrize("num_seeds", [8, pytest.param(100, marks=SLOW)])
@pytest.mark.parametrize("ways", WAYS)
def test_after_a_freeze_and_a_death_beside_a_liar_the_others_commit(
    ways: dict[str, int], num_seeds: int
) -> None:
    for seed in range(num_seeds):
        chance = random.Random(seed)
        liars = {chance.choice("abcde"): chance.sample(WITH_A_QUORUM, 2)}
        run = new_run("abcde", liars, seed, quorum=3, **ways)
        frozen, dying = chance.sample(run.honest, 2)
        commit_rounds(run, chance.randint(0, 1))
        run.pass_second()
        run.asleep[frozen] = chance.randint(2, 8)
        for _ in range(chance.randint(0, 10)):
            run.step()
        run.dead.add(dying)
        commit_rounds(run)


@pytest.mark.parametrize("num_seeds", [4, pytest.param(60, marks=SLOW)])
@pytest.mark.parametrize("ways", WAYS)
def test_freezes_and_deaths_between_any_two_steps_hold_up_no_honest_island(
    ways: dict[str, int], num_seeds: int
) -> None:
    for seed in range(num_seeds):
        chance = random.Random(seed)
        run = new_run("abcd", {}, seed, **ways)
        for _ in range(chance.randint(0, 3)):
            run.pass_second()
            for _ in range(chance.randint(0, 40)):
                run.step()
            run.asleep[chance.choice("abcd")] = chance.randint(1, 8)
        run.dead.add(chance.choice("abcd"))
        commit_rounds(run)


def test_a_second_liar_of_five_does_not_end_the_honest_ones() -> None:
    for seed in range(4):
        chance = random.Random(seed)
        liars = {name: chance.sample(HABITS, 2) for name in chance.sample("abcde", 2)}
        run = new_run("abcde", liars, seed, quorum=3)
        assert seconds_until(run, 1, 4 * BOUND) < 4 * BOUND, f"seed {seed}"
        assert not run.gave_up.keys() & set(run.honest)
