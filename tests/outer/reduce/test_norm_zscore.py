"""The z-score filter on a participant's own history of norms: when it applies, what it remembers,
and for how long.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import pytest
import torch

from outer.config import MergeConfig, OuterConfig
from outer.errors import InputError
from outer.reduce.filters import Histories, OutlierFilters
from outer.reduce.norm_zscore import (
    ALPHA,
    WARM_UP,
    History,
    is_anomalous,
    parse_history,
    to_tensor,
    update_history,
)
from tests.outer.islands import Island, fails_in, run_islands
from tests.outer.reduce.test_merges_in_a_reduce import Islands, Scaled, grads, means_of
from tests.outer.streams import layered

torch.set_num_threads(1)

BOUND = 3.0
CONFIG = MergeConfig(max_norm_zscore=BOUND)


def healthy(num_norms: int, seed: int = 0) -> list[float]:
    """Log-normal norms with a standard deviation of 10 %."""
    generator = random.Random(seed)
    return [math.exp(generator.gauss(0, 0.1)) for _ in range(num_norms)]


def after(norms: Sequence[float]) -> History:
    """The history after these norms."""
    history = reduce(update_history, norms, None)
    assert history is not None
    return history


@pytest.mark.parametrize(("num_norms", "expected"), [(WARM_UP - 1, False), (WARM_UP, True)])
def test_a_norm_ten_times_as_long_is_an_anomaly_once_warmed_up(
    num_norms: int, expected: bool
) -> None:
    assert is_anomalous(after(healthy(num_norms)), 10.0, BOUND) == expected


def test_a_short_norm_never_is() -> None:
    history = after(healthy(300))
    assert not is_anomalous(history, 0.1, BOUND) and not is_anomalous(history, 0.0, BOUND)


def false_alarms(seed: int, num_norms: int = 1000) -> int:
    history = after(healthy(WARM_UP, seed))
    alarms = 0
    for norm in healthy(num_norms, seed + 1000):
        if is_anomalous(history, norm, BOUND):
            alarms += 1
        else:
            history = update_history(history, norm)
    return alarms


def test_of_a_healthy_participants_norms_about_one_in_two_hundred_is_taken_for_one() -> None:
    alarms = [false_alarms(seed) for seed in range(4)]
    assert max(alarms) <= 12 and sum(alarms) <= 4 * 7, alarms


def test_norms_that_fall_as_training_goes_on_are_healthy() -> None:
    history = None
    for number, norm in enumerate(healthy(1000)):
        falling = norm * math.exp(-0.003 * number)
        assert not is_anomalous(history, falling, BOUND)
        history = update_history(history, falling)


def test_mean_and_variance_move_as_the_paper_says() -> None:
    mean, variance = 5.0, 0.0
    for norm in (7.0, 4.0, 6.5):
        delta = norm - mean
        mean += 0.02 * delta
        variance = 0.98 * (variance + 0.02 * delta**2)
    assert after([5.0, 7.0, 4.0, 6.5])[:3] == pytest.approx((4, mean, variance), rel=1e-12)


def test_the_bound_widens_when_z_scores_spread() -> None:
    calm = History(count=500, mean=1.0, variance=0.01)
    assert is_anomalous(calm, 1.35, BOUND) and is_anomalous(
        calm._replace(z_variance=0.25), 1.35, BOUND
    )
    assert not is_anomalous(calm._replace(z_variance=4.0), 1.35, BOUND)
    assert is_anomalous(calm._replace(z_variance=4.0), 1.65, BOUND)


def test_z_scores_are_counted_after_the_warm_up() -> None:
    before, norm = after(healthy(WARM_UP)), 1.2
    assert before.z_mean == before.z_variance == 0
    z = (norm - before.mean) / math.sqrt(before.variance)
    assert update_history(before, norm)[3:] == pytest.approx(
        (ALPHA * z, (1 - ALPHA) * ALPHA * z * z), rel=1e-12
    )


def test_norms_that_rounding_alone_sets_apart_are_equal() -> None:
    history = after([1.0] * WARM_UP)
    assert not is_anomalous(history, 1.0 + 1e-6, BOUND) and is_anomalous(history, 1.0 + 1e-5, BOUND)
    assert not is_anomalous(after([0.0] * WARM_UP), 5.0, BOUND), "zeros say nothing of a length"


# What a rank remembers

NAMES = "abc"


def begun(
    filters: OutlierFilters,
    round_number: int,
    norms: Mapping[str, float],
    participants: str = NAMES,
) -> list[bool]:
    """The participants that an attempt at the round leaves out of part 0."""
    parts = [torch.tensor([norm]) for norm in norms.values()]
    trial = filters.begin(round_number, list(participants))
    return trial.find_outliers(0, list(norms), parts, [1 / len(parts)] * len(parts), None)


def warm(num_rounds: int = WARM_UP) -> OutlierFilters:
    """Filters that have seen this many healthy rounds of a, b and c."""
    filters = OutlierFilters(CONFIG)
    for number, norm in enumerate(healthy(num_rounds)):
        begun(filters, number, dict.fromkeys(NAMES, norm))
        filters.commit(number, [0])
    return filters


def test_who_is_left_out_is_not_remembered_and_who_is_let_in_is() -> None:
    filters = warm()
    before = dict(filters.histories[0])
    assert begun(filters, WARM_UP, {"a": 1.0, "b": 10.0, "c": 1.0}) == [False, True, False]
    filters.commit(WARM_UP, [0])
    assert filters.histories[0] == before | {n: update_history(before[n], 1.0) for n in "ac"}


def test_when_all_would_be_left_out_none_is_and_what_is_let_in_counts() -> None:
    filters = warm()
    before = filters.histories[0]
    assert begun(filters, WARM_UP, dict.fromkeys(NAMES, 10.0)) == [False] * 3
    filters.commit(WARM_UP, [0])
    assert filters.histories[0] == {n: update_history(before[n], 10.0) for n in NAMES}


def test_what_another_filter_leaves_out_is_not_remembered() -> None:
    filters = OutlierFilters(MergeConfig(max_norm_zscore=BOUND, max_norm_ratio=5.0))
    assert begun(filters, 0, {"a": 1.0, "b": 10.0, "c": 1.0}) == [False, True, False]
    filters.commit(0, [0])
    assert filters.histories[0].keys() == {"a", "c"}


def test_an_attempt_that_is_aborted_changes_nothing() -> None:
    filters = warm()
    before = dict(filters.histories)
    begun(filters, WARM_UP, dict.fromkeys(NAMES, 1.25))
    begun(filters, WARM_UP, {"a": 1.0, "b": 1.125}, "ab")
    assert filters.histories == before
    filters.commit(WARM_UP, [0])
    assert filters.histories[0] == {
        n: update_history(before[0][n], norm) for n, norm in {"a": 1.0, "b": 1.125}.items()
    }


def test_who_gives_nothing_is_remembered_while_it_takes_part() -> None:
    filters = warm(3)
    before = filters.histories[0]["c"]
    begun(filters, 3, {"a": 1.0, "b": 1.0})
    filters.commit(3, [0])
    assert filters.histories[0]["c"] == before


def test_a_part_that_others_reduce_is_forgotten() -> None:
    filters = warm(3)
    filters.begin(3, list(NAMES))
    filters.commit(3, [0, 1])
    assert filters.histories == {}


def test_a_part_that_is_not_sent_is_remembered() -> None:
    filters = warm(3)
    before = dict(filters.histories)
    filters.begin(3, list(NAMES))
    filters.commit(3, [1])
    assert filters.histories == before


def test_after_a_missed_commit_nothing_is_remembered() -> None:
    filters = warm()
    assert begun(filters, WARM_UP + 1, {"a": 1.0, "b": 10.0, "c": 1.0}) == [False] * 3
    filters.commit(WARM_UP + 1, [0])
    assert filters.histories[0]["a"] == History(1, 1.0)


def test_ids_that_never_come_again_are_forgotten() -> None:
    filters = OutlierFilters(CONFIG)
    for number in range(50):
        names = f"a{chr(ord('b') + number % 20)}"
        begun(filters, number, dict.fromkeys(names, 1.0), names)
        filters.commit(number, [0])
        assert filters.histories[0].keys() == set(names)


# In the reduce, and over a stop


def test_a_participant_ten_times_as_long_as_before_is_left_out_of_the_mean() -> None:
    async def test() -> None:
        islands = Islands(NAMES, CONFIG, hooks={"c": Scaled(10.0)})
        given = grads(islands)
        remembered = {
            n: History(WARM_UP, mean=float(given[n][0].norm()), variance=0.1) for n in NAMES
        }
        islands.reducers["a"].filters.load({0: remembered}, next_round=7)
        means = means_of(await islands.reduce(given, round_number=7))
        assert torch.equal(means[0].values, given["a"][0] * 0.5 + given["b"][0] * 0.5)
        assert [dict(islands.reducers[n].filtered) for n in NAMES] == [{"c": 1}, {}, {}]

    asyncio.run(test())


def config() -> OuterConfig:
    return OuterConfig(
        merge=CONFIG, part_elements=256, transport="loopback", start_islands=2, quorum=2
    )


def histories(island: Island) -> dict[int, Histories]:
    return {
        part: dict(known) for part, known in island.outer.averager.memory.filters.histories.items()
    }


def test_a_run_stopped_and_resumed_remembers_what_one_never_stopped_does() -> None:
    saved: dict[str, tuple[dict[str, torch.Tensor], Any]] = {}

    def never_stopped(island: Island) -> dict[int, Histories]:
        island.outer.begin()
        for number in range(4):
            if number == 2:
                tensors, facts = island.outer.save()
                saved[island.name] = (
                    {name: values.clone() for name, values in tensors.items()},
                    facts,
                )
            island.round()
        return histories(island)

    def resumed(island: Island) -> dict[int, Histories]:
        tensors, facts = saved[island.name]
        room = island.outer.allocate(tensors)
        for name, values in room.items():
            values.copy_(tensors[name])
        island.outer.restore(room, facts)
        island.outer.replica.take_over()
        island.outer.begin()
        for _ in range(2):
            island.round()
        return histories(island)

    first = run_islands(dict.fromkeys("ab", never_stopped), config(), model=layered)
    assert (
        all(h.count == 4 for known in first["a"].values() for h in known.values())
        and first["a"]
        and first["b"]
    )
    assert run_islands(dict.fromkeys("ab", resumed), config(), model=layered) == first


def test_an_attempt_that_fails_in_a_run_leaves_no_trace() -> None:
    def lives(island: Island) -> dict[int, Histories]:
        island.outer.begin()
        for _ in range(3):
            island.round()
        return histories(island)

    plain = run_islands(dict.fromkeys("ab", lives), config(), model=layered)
    assert (
        run_islands(dict.fromkeys("ab", lives), config(), model=layered, faults={"b": fails_in(1)})
        == plain
    )


@pytest.mark.parametrize(
    "values", [(math.nan, 1, 1, 0, 0), (3, 1, -1, 0, 0), (-1, 1, 1, 0, 0), (3, 1, 1, 0, math.inf)]
)
def test_a_history_that_is_none_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="history of a part's norms"):
        parse_history(torch.tensor(values, dtype=torch.float64))
    assert parse_history(to_tensor(after(healthy(200)))) == after(healthy(200))


@pytest.mark.parametrize(
    "merge", [CONFIG, MergeConfig(min_cosine=0.1), MergeConfig(rule="centered_clip")]
)
def test_codecs_of_which_every_island_makes_the_mean_have_no_filter_or_rule_that_remembers(
    merge,
) -> None:
    with pytest.raises(ValueError, match="max_norm_ratio remembers nothing"):
        OuterConfig(merge=merge, codec="topk")
