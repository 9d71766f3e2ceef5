"""Averaged moments of the inner optimizer (DES-LOC, 2505.22549): what is sent when, what it
becomes, who takes it.
"""

import re
import threading
from functools import partial

import pytest
import torch

from outer.codecs.cast import Bf16Codec
from outer.config import OuterConfig, OuterOptimizerConfig
from outer.errors import MessageError, OuterError
from outer.hooks import NoHooks
from outer.reduce.payloads import first_negative
from outer.report import CaughtUp, RoundReport
from outer.space.fragments import FragmentSchedule, add_moments, build_part_groups
from outer.space.layout import Space
from outer.state.global_state import GlobalState
from outer.state.part_state import Position, advance, unpack
from tests.outer.islands import (
    GUARD_SECONDS,
    Island,
    Spec,
    fails_in,
    progress,
    run_islands,
    tensors,
)
from tests.outer.streams import Stream, layered

torch.set_num_threads(1)

TOKENS = {"a": 100, "b": 300, "c": 57}
KINDS = ("params", "exp_avg", "exp_avg_sq")


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {"start_islands": num_islands, "transport": "loopback", "wait_seconds": GUARD_SECONDS}
    return OuterConfig(**{**fields, "moments": (2, 3), "inner_steps": 7, **changes})


def model() -> dict[str, torch.Tensor]:
    """Params, and their moments as zeros."""
    return with_zeros(tensors())


def with_zeros(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return params | {
        f"{n}@{kind}": torch.zeros_like(v) for kind in KINDS[1:] for n, v in params.items()
    }


def train(island: Island, step: int) -> None:
    """Fake inner steps of params and first moments; second moments become others, over many
    magnitudes.
    """
    for held, values in zip(island.params.slices, island.params.values, strict=True):
        moved = progress(island.name, step, held.name, values)
        values.copy_(10 ** (1000 * moved) if kind_of(held.name) == "exp_avg_sq" else values + moved)


def kind_of(name: str) -> str:
    return name.partition("@")[2] or "params"


def local(island: Island) -> dict[str, torch.Tensor]:
    """By kind, this island's params or moments, flat."""
    named = list(zip(island.params.slices, island.params.values, strict=True))
    return {
        kind: torch.cat([v.flatten() for held, v in named if kind_of(held.name) == kind])
        for kind in KINDS
    }


Seen = list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], RoundReport]]


def rounds(num_rounds: int, island: Island) -> Seen:
    """Of each round: what this island had before and after it, and the report."""
    island.outer.begin()
    found = []
    for number in range(num_rounds):
        train(island, number)
        before = local(island)
        report = island.commit(TOKENS[island.name])
        found.append((before, local(island), report))
    return found


def mean_of(found: dict[str, Seen], number: int, kind: str) -> torch.Tensor:
    """Of what the islands had before the round, in fp32 and in their order."""
    total = torch.zeros_like(found["a"][number][0][kind])
    for name, seen in found.items():
        total += seen[number][0][kind] * torch.tensor(
            TOKENS[name] / sum(TOKENS[name] for name in found)
        )
    return total


def test_moments_become_their_plain_mean_in_their_period_and_stay_apart_between() -> None:
    made = config(3, optimizer=OuterOptimizerConfig(lr=0.3))
    found = run_islands(dict.fromkeys("abc", partial(rounds, 6)), made, model=model)
    for number in range(6):
        for kind, period in (("exp_avg", 2), ("exp_avg_sq", 3)):
            for name in "abc":
                before, after, _ = found[name][number]
                is_sent = (number + 1) % period == 0
                assert torch.equal(
                    after[kind], mean_of(found, number, kind) if is_sent else before[kind]
                ), number
        assert len({found[name][number][2].digest for name in "abc"}) == 1


def test_params_go_on_as_without_moments() -> None:
    def params(made: OuterConfig) -> list[torch.Tensor]:
        found = run_islands(
            dict.fromkeys("ab", partial(rounds, 3)), made, model=model if made.moments else tensors
        )
        return [after["params"] for _, after, _ in found["a"]]

    # A model without moments has no moments to read.
    def only_params(island: Island) -> list[torch.Tensor]:
        island.outer.begin()
        found = []
        for number in range(3):
            island.train(number)
            island.commit(TOKENS[island.name])
            found.append(island.params.flat())
        return found

    without = run_islands(dict.fromkeys("ab", only_params), config(2, moments=None))["a"]
    assert all(torch.equal(a, b) for a, b in zip(params(config(2)), without, strict=True))


def test_moments_every_third_and_sixth_time_make_traffic_one_and_a_half_times_that_of_params() -> (
    None
):
    def sent(moments: tuple[int, int] | None) -> list[int]:
        def script(island: Island) -> list[int]:
            island.outer.begin()
            return [island.commit().bytes_sent for _ in range(6)]

        made = config(2, moments=moments)
        found = run_islands(dict.fromkeys("ab", script), made, model=model if moments else tensors)
        return [a + b for a, b in zip(found["a"], found["b"], strict=True)]

    plain, averaged = sent(None), sent((3, 6))
    assert [b / a for a, b in zip(plain, averaged, strict=True)] == [1, 1, 2, 1, 1, 3]
    assert 2 * sum(averaged) == 3 * sum(plain)


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int4", "topk"])
def test_second_moments_of_all_magnitudes_keep_their_size_through_every_codec(codec: str) -> None:
    made = config(2, codec=codec, moments=(1, 1), coding={"feedback": 0.9})
    found = run_islands(dict.fromkeys("ab", partial(rounds, 2)), made, model=model)
    mean, after = mean_of(found, 1, "exp_avg_sq"), found["a"][1][1]["exp_avg_sq"]
    assert torch.equal(after, found["b"][1][1]["exp_avg_sq"])
    assert mean.max() / mean.min() > 1e20 and after.min() > 0
    torch.testing.assert_close(after, mean, rtol=2**-7, atol=0)


def test_of_second_moments_alone_none_may_be_negative() -> None:
    values = torch.tensor([1.0, -0.5])
    assert first_negative(values, "exp_avg_sq") == 1
    assert first_negative(values, "exp_avg") is first_negative(values, "params") is None
    assert first_negative(values.abs(), "exp_avg_sq") is None


class Lies(NoHooks):
    """An island that sends its values turned around."""

    def pseudo_grad(self, round_number: int, values: torch.Tensor) -> torch.Tensor:
        return -values


def test_a_peer_whose_second_moments_are_negative_is_named_and_nothing_of_it_is_committed() -> None:
    both_are_done = threading.Barrier(2)

    def script(island: Island) -> tuple[bool, str]:
        island.outer.begin()
        train(island, 0)
        try:
            report = island.attempt(1)
            return report.is_committed, report.cause
        except OuterError as error:  # b itself may find it first, where it is the reducer
            return False, str(error)
        finally:
            both_are_done.wait(GUARD_SECONDS)

    found = run_islands(
        dict.fromkeys("ab", script), config(2, moments=(1, 1)), model=model, hooks={"b": Lies()}
    )
    assert not any(is_committed for is_committed, _ in found.values())
    # Whoever finds it second may only see that the other has left.
    assert any(
        re.search(r"island 'b' sent .* a second moment of -", cause) for _, cause in found.values()
    )


def test_an_islands_own_negative_second_moment_stops_it_by_name() -> None:
    def script(island: Island) -> str:
        island.outer.begin()
        named = dict(
            zip([held.name for held in island.params.slices], island.params.values, strict=True)
        )
        named["wq@exp_avg_sq"][2, 3] = -0.5
        with pytest.raises(OuterError) as caught:
            island.attempt(1)
        return str(caught.value)

    found = run_islands({"a": script}, config(1, moments=(1, 1)), model=model)
    assert found["a"] == "'wq@exp_avg_sq' holds -0.5, but a mean of squares is never below 0"


# -- fragments, delay, mix -------------------------------------------------------------------------


def test_a_round_sends_of_its_fragment_what_its_cycle_is_for() -> None:
    made = config(1, fragments=3, moments=(1, 2))
    specs = [Spec(name, tuple(values.shape)) for name, values in layered().items()]
    space = Space(
        add_moments(specs, made), 16, 1, build_part_groups(specs, made, splits_fine=False)
    )
    sent = [
        sorted(
            (space.part_groups[g].fragment, space.part_groups[g].kind)
            for g in space.part_groups_in(r)
        )
        for r in range(6)
    ]
    assert sent[:3] == [[(f, "exp_avg"), (f, "params")] for f in range(3)]
    assert sent[3:] == [[(f, "exp_avg"), (f, "exp_avg_sq"), (f, "params")] for f in range(3)]
    assert sorted(space.names) == sorted(with_zeros(layered()))


@pytest.mark.parametrize("inner_steps,fragments,period", [(7, 1, 1), (7, 3, 2), (12, 4, 3)])
def test_the_steps_behind_a_moment_are_those_of_the_last_round_that_sent_it(
    inner_steps: int, fragments: int, period: int
) -> None:
    schedule = FragmentSchedule(inner_steps, fragments)
    for fragment in range(fragments):
        expected = 0
        for number in range(4 * period * fragments):
            assert schedule.last_end(fragment, period, number) == expected
            if number % fragments == fragment and (number // fragments + 1) % period == 0:
                expected = schedule.end(number)


def test_moments_of_a_fragment_land_behind_the_training_and_are_mixed_as_its_params_are() -> None:
    made = config(2, fragments=3, delay=1, mix=0.5, moments=(1, 2), rounds=2)

    def script(
        island: Island,
    ) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict, str]]:
        island.outer.begin()
        stream, found = Stream(island, made), []
        for number in range(made.num_rounds):
            train(island, number)
            stream.launch()
            train(island, 100 + number)
            before = {
                h.name: v.clone()
                for h, v in zip(island.params.slices, island.params.values, strict=True)
            }
            stream.land()
            after = {
                h.name: v.clone()
                for h, v in zip(island.params.slices, island.params.values, strict=True)
            }
            digest = stream.landings[-1].reports[-1].digest
            found.append((before, after, dict(island.outer.moment_steps(number)), digest))
        return found

    found = run_islands(dict.fromkeys("ab", script), made, model=lambda: with_zeros(layered()))
    for number in range(made.num_rounds):
        assert found["a"][number][3] == found["b"][number][3]
        names = {
            name
            for name in found["a"][number][0]
            if not torch.equal(*(f[name] for f in found["a"][number][:2]))
        }
        of_fragment = [["layers.0.w", "layers.2.w"], ["layers.1.w"], ["embed", "head"]][number % 3]
        kinds = ["", "@exp_avg", "@exp_avg_sq"] if number >= 3 else ["", "@exp_avg"]
        assert names == {name + kind for name in of_fragment for kind in kinds}
        end = FragmentSchedule(7, 3).end(number)
        assert found["a"][number][2] == (dict.fromkeys(of_fragment, end) if number >= 3 else {})
        for name in names:
            # after = before / 2 + global / 2, on both
            shared = [2 * f[number][1][name] - f[number][0][name] for f in (found["a"], found["b"])]
            torch.testing.assert_close(*shared, rtol=1e-4, atol=1e-3 * float(shared[0].abs().max()))


# -- whoever takes the state -----------------------------------------------------------------------


def test_a_joiner_has_the_moments_and_the_steps_behind_them() -> None:
    ready_to_join, has_begun = threading.Event(), threading.Event()
    all_old = threading.Barrier(2, ready_to_join.set)

    def old(island: Island) -> tuple:
        seen = rounds(4, island)
        state = island.state()
        all_old.wait(GUARD_SECONDS)
        assert has_begun.wait(GUARD_SECONDS)
        return (
            state,
            [seen[3][1]["exp_avg"], seen[2][1]["exp_avg_sq"]],
            [island.round(100).digest for _ in range(1)],
        )

    def joiner(island: Island) -> tuple:
        assert ready_to_join.wait(GUARD_SECONDS)
        assert set(island.outer.moment_steps().values()) == {0}
        island.outer.begin()
        state, held = island.state(), local(island)
        has_begun.set()
        # Second moments were averaged last after round 2, of 7 inner steps each like the others.
        assert island.outer.moment_steps() == dict.fromkeys(tensors(), 3 * 7)
        return (
            state,
            [held["exp_avg"], held["exp_avg_sq"]],
            [island.round(100).digest for _ in range(1)],
        )

    found = run_islands({"a": old, "b": old, "c": joiner}, config(2), model=model)
    assert found["a"][0] == found["b"][0] == found["c"][0] and found["a"][2] == found["c"][2]
    for ours, theirs in zip(found["c"][1], found["a"][1], strict=True):
        assert torch.equal(ours, theirs) and ours.abs().max() > 0


def test_a_part_of_moments_is_handed_over_without_momentum_and_brought_up_to_date_by_means() -> (
    None
):
    rule, generator = OuterOptimizerConfig(), torch.Generator().manual_seed(3)
    state = GlobalState({0: torch.zeros(9), 1: torch.zeros(9)}, rule, replaced=[1])
    _, joiner = unpack(state.pack(1), 9, has_momentum=False)
    assert joiner.num_bytes == 4 * 9
    for number in range(3):
        means = {i: torch.rand(9, generator=generator) for i in range(2)}
        payloads = {i: Bf16Codec().encode(mean) for i, mean in means.items()}
        means = {i: Bf16Codec().decode(payload, 9) for i, payload in payloads.items()}
        state.commit(means, Position(round=number + 1, tokens=1), payloads)
        joiner = advance(joiner, means[1], None)
        assert torch.equal(joiner.params, state.parts[1]) and torch.equal(state.parts[1], means[1])
        assert not torch.equal(state.parts[0], means[0])
    with pytest.raises(MessageError, match="has 36 bytes, expected 72"):
        unpack(state.pack(1), 9)


@pytest.mark.slow
def test_an_island_that_missed_a_round_keeps_its_own_moments_with_its_progress() -> None:
    alone, taken = threading.Event(), threading.Event()
    both = threading.Barrier(2)
    made = config(2, moments=(1, 1))

    def quick(island: Island) -> str:
        rounds(4, island)
        both.wait(GUARD_SECONDS)
        island.outer.pace.deadlines.initial_seconds = 0.0
        train(island, 4)
        assert island.commit().participants == ["a"]  # b is not ready: it is given up
        alone.set()
        assert taken.wait(GUARD_SECONDS)
        island.outer.pace.deadlines.initial_seconds = GUARD_SECONDS
        train(island, 5)
        return island.commit().digest

    def slow(island: Island) -> str:
        rounds(4, island)
        both.wait(GUARD_SECONDS)
        train(island, 4)
        before = local(island)
        assert alone.wait(GUARD_SECONDS)
        with pytest.raises(CaughtUp) as caught:
            island.attempt(100)
        after = local(island)
        assert caught.value.is_kept and not torch.equal(before["params"], after["params"])
        assert all(torch.equal(before[kind], after[kind]) for kind in KINDS[1:])
        taken.set()
        return island.commit().digest

    found = run_islands({"a": quick, "b": slow}, made, model=model)
    assert found["a"] == found["b"]


def test_an_aborted_attempt_leaves_moments_alone() -> None:
    def script(island: Island) -> bool:
        island.outer.begin()
        train(island, 0)
        before = local(island)
        assert not island.attempt(1).is_committed
        return all(torch.equal(before[kind], local(island)[kind]) for kind in KINDS)

    found = run_islands(
        dict.fromkeys("ab", script),
        config(2, moments=(1, 1)),
        model=model,
        faults={"b": fails_in(0)},
    )
    assert found == {"a": True, "b": True}
