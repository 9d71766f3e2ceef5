"""No round commits a mean that is far longer than what healthy islands make, whoever sends what is
so long.
"""

import logging
from math import inf

import pytest
import torch

from outer.config import MergeConfig, OuterConfig, OuterOptimizerConfig
from outer.hooks import NoHooks
from outer.merges.bound import Bound, RecentLengths, scale_to
from outer.network.endpoints import Endpoint, Leg, Tag
from outer.report import RoundReport
from tests.outer.islands import GUARD_SECONDS, ForwardingTransport, Island, run_islands

torch.set_num_threads(1)

POISON = 1e30
"""Finite, and so is a mean with it, but no loss of a model with such params."""


class Poison(NoHooks):
    """One payload is POISON times as long from this round on."""

    def __init__(self, first: int) -> None:
        self._first = first

    def pseudo_grad(self, round_number: int, values: torch.Tensor) -> torch.Tensor:
        return values * POISON if round_number >= self._first else values


class LongMeans(ForwardingTransport):
    """As the reducer of a part, send POISON times its mean."""

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        if tag.leg is Leg.GATHER:
            payload = (payload.view(torch.float32) * POISON).view(torch.uint8)
        await super().send(to, tag, payload)


def config(num_islands: int, **merge: object) -> OuterConfig:
    return OuterConfig(
        start_islands=num_islands,
        transport="loopback",
        wait_seconds=GUARD_SECONDS,
        part_elements=256,
        merge=MergeConfig(**merge),  # pyright: ignore[reportArgumentType]
        optimizer=OuterOptimizerConfig(lr=1.0, momentum=0.0),
    )


def commits(num_rounds: int, island: Island) -> list[list[str]]:
    """Participants of each round that is committed; the local params stay finite."""
    island.outer.begin()
    found = []
    for _ in range(num_rounds):
        found.append(island.round().participants)
        assert island.params.flat().abs().max() < 100
    return found


@pytest.mark.parametrize("first", [0, 3])
def test_of_three_islands_the_one_with_a_finite_poison_is_left_out(first: int) -> None:
    def poisoner(island: Island) -> None:
        island.outer.begin()
        for number in range(first + 1):
            island.train(number)
            assert island.attempt(100).is_committed == (number < first)

    honest = {name: lambda island: commits(first + 2, island) for name in "ab"}
    found = run_islands({**honest, "c": poisoner}, config(3), hooks={"c": Poison(first)})
    assert found["a"] == found["b"] == [["a", "b", "c"]] * first + [["a", "b"]] * 2


def test_without_a_bound_the_poison_is_committed() -> None:
    def one(island: Island) -> float:
        island.outer.begin()
        island.round()
        return island.params.flat().abs().max().item()

    found = run_islands(
        dict.fromkeys("abc", one), config(3, refuse_norm_ratio=None), hooks={"c": Poison(0)}
    )
    assert found["a"] > POISON / 1000


def test_a_reducer_whose_mean_is_too_long_is_left_out() -> None:
    def liar(island: Island) -> None:
        island.outer.begin()
        island.train(0)
        assert not island.attempt(100).is_committed

    honest = {name: lambda island: commits(2, island) for name in "ab"}
    found = run_islands(
        {**honest, "c": liar},
        config(3),
        model=six_parts,
        faults={"c": lambda _, transport: LongMeans(transport)},
    )
    assert found["a"] == found["b"] == [["a", "b"]] * 2


def six_parts() -> dict[str, torch.Tensor]:
    """Enough that each of three islands reduces some."""
    return {name: torch.ones(64, 8) for name in ("embed", "wq", "head")}


def test_two_islands_commit_no_poison_name_the_other_and_ask_once_a_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def three_attempts(island: Island) -> list[RoundReport]:
        island.outer.begin()
        island.train(0)
        for values in island.params.values:
            values.mul_(POISON if island.name == "b" else 1)
        return [island.attempt(100) for _ in range(3)]

    with caplog.at_level(logging.WARNING, "outer.rounds.island_reduce"):
        found = run_islands(dict.fromkeys("ab", three_attempts), config(2))
    assert not any(report.is_committed for reports in found.values() for report in reports)
    assert all(report.participants == ["a", "b"] for report in found["a"]), "neither is accused"
    (asked,) = [
        text for record in caplog.records if "cannot be told which" in (text := record.getMessage())
    ]
    assert "and the rest comes from 'b'. With two islands" in asked
    assert "the rest comes from 'b'" in found["b"][0].cause, "the other one is told, too"


def test_healthy_islands_with_very_different_amounts_of_tokens_commit_together() -> None:
    def script(tokens: int, island: Island) -> list[list[str]]:
        island.outer.begin()
        found = []
        for number in range(3):
            before = [values.clone() for values in island.params.values]
            island.train(number)
            for old, values in zip(before, island.params.values, strict=True):
                values.copy_(old + (values - old) * tokens / 1000)
            found.append(island.commit(tokens).participants)
        return found

    tokens = {"a": 1, "b": 500, "c": 1000}
    found = run_islands(
        {name: lambda island, n=n: script(n, island) for name, n in tokens.items()}, config(3)
    )
    assert list(found.values()) == [[["a", "b", "c"]] * 3] * 3


def test_a_part_may_be_longer_than_those_of_others_up_to_the_limit_of_whole_pseudo_gradients() -> (
    None
):
    bound = Bound(20.0, {"params": 1.0})
    assert bound.find_too_long("params", {"a": 1e-6, "b": 1e-6, "c": 19.0}) is None
    assert bound.find_too_long("params", {"a": 1e-6, "b": 1e-6, "c": 21.0}) == "c"


def test_a_part_that_is_like_those_of_most_others_passes_whatever_this_island_makes() -> None:
    assert (
        Bound(20.0, {"params": 1e-6}).find_too_long("params", {"a": 1e-6, "b": 1.0, "c": 2.0})
        is None
    )


def test_an_island_does_not_refuse_what_it_has_sent_itself() -> None:
    lengths = {"a": 1.0, "b": 1.0, "c": inf}
    assert Bound(20.0, {"params": 1.0}, me="c").find_too_long("params", lengths) is None


def test_of_fewer_than_three_none_is_too_long() -> None:
    assert Bound(20.0, {"params": 1.0}).find_too_long("params", {"a": 1.0, "b": inf}) is None


def test_second_moments_have_the_square_of_the_ratio_and_unknown_kinds_no_limit() -> None:
    bound = Bound(20.0, {"exp_avg": 1.0, "exp_avg_sq": 1.0})
    assert [bound.limit(kind) for kind in ("exp_avg", "exp_avg_sq", "params")] == [20.0, 400.0, inf]


def test_the_bound_follows_the_longer_of_now_and_the_median_of_the_last_rounds() -> None:
    recent = RecentLengths(20.0, "a")
    for length in (1.0, 3.0, 2.0, 0.0, inf):
        recent.commit(0, {"params": length})
    assert recent.bound(0, {"params": 0.5}).limit("params") == 40.0
    assert recent.bound(0, {"params": 7.0}).limit("params") == 140.0
    assert recent.bound(1, {}).limit("params") == inf, "of another fragment nothing is known"


def test_an_island_of_fewer_tokens_measures_as_if_it_had_as_many_as_the_others() -> None:
    assert scale_to({"a": 10, "b": 500, "c": 500}, "a") == 50.0
    assert scale_to({"a": 1000, "b": 500, "c": 500}, "a") == 1.0
    assert scale_to({"a": 0, "b": 500}, "a") == 1.0
