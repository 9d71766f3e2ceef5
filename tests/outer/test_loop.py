"""The outer loop of whole islands: rounds, aborts, joiners, bit for bit."""

import threading
from functools import partial

import pytest
import torch

from outer.config import OuterConfig, OuterOptimizerConfig
from outer.errors import OuterError
from outer.network.frames import HEADER_BYTES
from outer.report import CaughtUp, RoundReport
from tests.outer.islands import (
    GUARD_SECONDS,
    FakeParams,
    Island,
    dies_in,
    fails_in,
    progress,
    run_islands,
    tensors,
)

torch.set_num_threads(1)

AVERAGE = OuterOptimizerConfig(lr=1.0, momentum=0.0)
TOKENS = {"a": 100, "b": 300, "c": 57}


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {"start_islands": num_islands, "transport": "loopback", "wait_seconds": GUARD_SECONDS}
    return OuterConfig(**{**fields, **changes})


def rounds(num_rounds: int, island: Island) -> list[torch.Tensor]:
    """The local params after each round; they are the global params then."""
    island.outer.begin()
    found = []
    for _ in range(num_rounds):
        island.round(TOKENS[island.name])
        found.append(island.params.flat())
    return found


def reference(participants: list[str], optimizer: OuterOptimizerConfig) -> list[torch.Tensor]:
    """The same in one process: the params after each round, made by the islands named for it
    ("abc").
    """
    named = tensors()
    flat = torch.cat([values.flatten() for values in named.values()])
    momentum = {
        "momentum": optimizer.momentum,
        "nesterov": optimizer.nesterov and optimizer.momentum > 0,
    }
    sgd = torch.optim.SGD([flat], lr=optimizer.lr, **momentum)
    found = []
    for number, names in enumerate(participants):
        mean = torch.zeros_like(flat)
        for island in names:
            steps = torch.cat(
                [progress(island, number, n, as_matrix_like(v)).flatten() for n, v in named.items()]
            )
            weight = torch.tensor(TOKENS[island] / sum(TOKENS[name] for name in names))
            mean += (flat - (flat + steps)) * weight
        flat.grad = mean
        sgd.step()
        found.append(flat.clone())
    return found


def as_matrix_like(values: torch.Tensor) -> torch.Tensor:
    return FakeParams({"w": values}).values[0]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (left, right) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(left, right), (
            f"round {number}: {int((left != right).sum())} elements differ"
        )


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@pytest.mark.parametrize(
    "optimizer", [OuterOptimizerConfig(), OuterOptimizerConfig(nesterov=False), AVERAGE]
)
def test_the_trajectory_is_that_of_sgd_on_averaged_pseudo_gradients(
    names: str, optimizer: OuterOptimizerConfig
) -> None:
    found = run_islands(
        dict.fromkeys(names, partial(rounds, 6)), config(len(names), optimizer=optimizer)
    )
    for name in names:
        assert_equal(found[name], reference([names] * 6, optimizer))


def test_lr_one_without_momentum_is_the_token_weighted_mean_of_the_params() -> None:
    def script(island: Island) -> tuple[torch.Tensor, torch.Tensor]:
        island.outer.begin()
        local = island.train(0)
        island.commit(TOKENS[island.name])
        return local, island.params.flat()

    found = run_islands(dict.fromkeys("abc", script), config(3, optimizer=AVERAGE))
    mean = sum(TOKENS[name] * found[name][0].double() for name in "abc") / sum(TOKENS.values())
    for name in "abc":
        torch.testing.assert_close(found[name][1].double(), mean, rtol=0, atol=1e-6)


def test_reports_say_what_happened() -> None:
    def script(island: Island) -> list:
        island.outer.begin()
        return [island.round(TOKENS[island.name]) for _ in range(3)]

    reports = run_islands(dict.fromkeys("ab", script), config(2))
    for number in range(3):
        a, b = (reports[name][number] for name in "ab")
        assert a.digest == b.digest
        assert (a.round, a.attempt, a.participants, a.is_committed) == (number, 0, ["a", "b"], True)
        # 121 fp32 elements in 8 parts; each part goes one way as a pseudo-gradient and the other as
        # the mean.
        assert (
            a.bytes_sent
            == b.bytes_sent
            == a.bytes_received
            == b.bytes_received
            == 4 * 121 + 8 * HEADER_BYTES
        )
        assert 0 < a.pseudo_grad_norm < 1 and a.cause == ""
    assert len({report.digest for report in reports["a"]}) == 3


def test_reports_compare_the_pseudo_gradient_with_the_mean() -> None:
    def script(island: Island) -> tuple[torch.Tensor, torch.Tensor, RoundReport]:
        island.outer.begin()
        before = island.params.flat().double()
        own = before - island.train(0).double()
        report = island.commit(TOKENS[island.name])
        return own, before - island.params.flat().double(), report

    found = run_islands(dict.fromkeys("abc", script), config(3, optimizer=AVERAGE))
    for own, mean, report in found.values():
        assert report.mean_norm == pytest.approx(float(mean.norm()), rel=1e-4)
        assert report.mean_cosine == pytest.approx(
            float(own @ mean / own.norm() / mean.norm()), abs=1e-4
        )
        assert report.signers == 3


def test_the_position_counts_rounds_and_the_tokens_of_all_islands() -> None:
    def script(island: Island) -> tuple[int, int]:
        rounds(2, island)
        return island.outer.position.round, island.outer.position.tokens

    assert set(run_islands(dict.fromkeys("abc", script), config(3)).values()) == {
        (2, 2 * sum(TOKENS.values()))
    }


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8"])
def test_digests_and_params_are_equal_everywhere_with_a_lossy_codec(codec: str) -> None:
    def script(island: Island) -> tuple[list[str], torch.Tensor]:
        island.outer.begin()
        return [island.round(TOKENS[island.name]).digest for _ in range(4)], island.params.flat()

    model = partial(tensors, scale=30)
    found = run_islands(dict.fromkeys("abc", script), config(3, codec=codec), model=model)
    assert found["a"][0] == found["b"][0] == found["c"][0]
    assert torch.equal(found["a"][1], found["b"][1]) and torch.equal(found["b"][1], found["c"][1])


# -- aborted rounds --------------------------------------------------------------------------------


def test_an_aborted_attempt_changes_nothing_and_keeps_local_progress() -> None:
    def script(island: Island) -> list[torch.Tensor]:
        found = rounds(1, island)
        state, digest, local = island.state(), island.outer.digest, island.train(1)
        report = island.attempt(TOKENS[island.name])
        assert not report.is_committed and report.cause
        assert island.state() == state and island.outer.digest == report.digest == digest
        assert torch.equal(island.params.flat(), local)
        assert island.commit(TOKENS[island.name]).attempt == 1
        return [*found, island.params.flat()]

    found = run_islands(dict.fromkeys("abc", script), config(3), faults={"b": fails_in(1)})
    for name in "abc":
        assert_equal(found[name], reference(["abc"] * 2, OuterOptimizerConfig()))


@pytest.mark.parametrize("victim", "abc")
def test_when_an_island_dies_in_a_round_the_others_go_on_without_it(victim: str) -> None:
    def script(island: Island) -> list[torch.Tensor]:
        if island.name != victim:
            return rounds(4, island)
        rounds(2, island)
        island.train(2)
        assert not island.attempt(TOKENS[island.name]).is_committed
        return []

    found = run_islands(dict.fromkeys("abc", script), config(3), faults={victim: dies_in(2)})
    survivors = "abc".replace(victim, "")
    for name in survivors:
        assert_equal(
            found[name], reference(["abc", "abc", survivors, survivors], OuterOptimizerConfig())
        )


def test_a_non_finite_pseudo_gradient_stops_its_island_by_name_and_the_others_go_on() -> None:
    def script(island: Island) -> list[torch.Tensor] | str:
        if island.name != "b":
            return rounds(3, island)
        rounds(1, island)
        island.train(1)
        island.params.values[1][2, 3] = torch.inf
        with pytest.raises(OuterError) as caught:
            island.attempt(TOKENS["b"])
        island.outer.leave()
        return str(caught.value)

    found = run_islands(dict.fromkeys("abc", script), config(3))
    assert found["b"] == "the pseudo-gradient of 'wq' holds -inf"
    for name in "ac":
        assert_equal(found[name], reference(["abc", "ac", "ac"], OuterOptimizerConfig()))


def test_too_few_islands_end_the_run_with_the_reason() -> None:
    def script(island: Island) -> None:
        island.outer.begin()
        with pytest.raises(OuterError, match=r"1 of outer\.quorum 2 islands"):
            island.attempt(1)

    run_islands({"a": script}, config(1, quorum=2, below_quorum="stop", wait_seconds=0.2))


# -- joiners ---------------------------------------------------------------------------------------


def test_a_joiner_takes_the_state_bit_for_bit_and_commits_with_the_others() -> None:
    ready_to_join, has_begun = threading.Event(), threading.Event()
    all_old = threading.Barrier(2, ready_to_join.set)

    def old(island: Island) -> tuple[list[bytes], list[str]]:
        rounds(2, island)
        state = island.state()
        all_old.wait(GUARD_SECONDS)
        assert has_begun.wait(GUARD_SECONDS)
        return state, [island.round(TOKENS[island.name]).digest for _ in range(3)]

    def joiner(island: Island) -> tuple[list[bytes], list[str]]:
        assert ready_to_join.wait(GUARD_SECONDS)
        position = island.outer.begin()
        assert (position.round, position.tokens) == (2, 2 * (TOKENS["a"] + TOKENS["b"]))
        state = island.state()
        has_begun.set()
        return state, [island.round(TOKENS[island.name]).digest for _ in range(3)]

    found = run_islands({"a": old, "b": old, "c": joiner}, config(2))
    assert found["a"] == found["b"] == found["c"]


def test_a_joiners_own_initial_params_do_not_matter() -> None:
    joined, begun = threading.Event(), threading.Event()

    def old(island: Island) -> torch.Tensor:
        rounds(1, island)
        begun.set()
        assert joined.wait(GUARD_SECONDS)
        island.round(100)
        return island.params.flat()

    def joiner(island: Island) -> torch.Tensor:
        assert begun.wait(GUARD_SECONDS)
        island.outer.begin()
        joined.set()
        island.round(300)
        return island.params.flat()

    seeds = iter([1, 2])
    found = run_islands({"a": old, "b": joiner}, config(1), model=lambda: tensors(next(seeds)))
    assert torch.equal(found["a"], found["b"])


def test_an_aborted_attempt_is_told_when_it_is_aborted_and_not_when_the_round_lands() -> None:
    def script(island: Island) -> list[tuple[int, int, bool]]:
        told: list[tuple[int, int, bool]] = []
        island.outer.averager._on_abort = lambda report: told.append(
            (report.round, report.attempt, island.outer.position.round == report.round)
        )
        island.outer.begin()
        island.train(0)
        island.outer.launch(TOKENS[island.name])
        island.outer.land()
        return told

    found = run_islands(dict.fromkeys("ab", script), config(2), faults={"a": fails_in(0)})
    for told in found.values():
        # On a machine that stands still for seconds a further attempt may abort.
        assert told
        assert told == [(0, attempt, True) for attempt in range(len(told))]


def test_an_island_that_missed_a_round_takes_the_state_and_goes_on() -> None:
    others_done, taken = threading.Event(), threading.Event()

    def quick(island: Island) -> torch.Tensor:
        found = rounds(1, island)
        others_done.set()
        assert taken.wait(GUARD_SECONDS)
        island.round(100)
        assert not torch.equal(island.params.flat(), found[0])
        return island.params.flat()

    def slow(island: Island) -> torch.Tensor:
        # It announces itself only now, as one whose record the others could not see.
        island.train(0)
        assert others_done.wait(GUARD_SECONDS)
        island.outer.averager.runner.leader.announce()
        with pytest.raises(CaughtUp, match=r"in round 1 .* this island in round 0"):
            island.attempt(100)
        taken.set()
        assert island.outer.position.round == 1
        island.round(100)
        return island.params.flat()

    found = run_islands({"a": quick, "b": slow}, config(1))
    assert torch.equal(found["a"], found["b"])


@pytest.mark.slow
def test_another_model_takes_no_state(caplog: pytest.LogCaptureFixture) -> None:
    begun, refused = threading.Event(), threading.Event()

    def old(island: Island) -> None:
        rounds(1, island)
        begun.set()
        assert refused.wait(GUARD_SECONDS)

    def other(island: Island) -> int:
        assert begun.wait(GUARD_SECONDS)
        try:
            return island.outer.begin().round
        finally:
            refused.set()

    scales = iter([1, 2])
    found = run_islands(
        {"a": old, "b": other}, config(1), model=lambda: tensors(scale=next(scales))
    )
    assert found["b"] == 0 and "trains another model" in caplog.text
