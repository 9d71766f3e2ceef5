"""Buffers as committed state: what they become in each kind of round, who takes them, and what is
refused.
"""

import re
import threading
from functools import partial

import pytest
import torch

from outer.config import OuterConfig, OuterOptimizerConfig
from outer.errors import OuterError
from outer.hooks import NoHooks
from outer.merges.mean import hold_between
from outer.report import CaughtUp
from outer.space.fragments import assign_buffers
from tests.outer.islands import GUARD_SECONDS, Island, Spec, progress, run_islands, tensors
from tests.outer.paces import Trainee
from tests.outer.rounds.test_meeting_again import restore
from tests.outer.streams import TOKENS, Stream, layered
from tests.outer.streams import config as stream_config

torch.set_num_threads(1)

BIAS = "layers.1.router.bias@buffer"
RUNNING = "layers.2.norm.running_var@buffer"
OWN = "steps@donor_buffer"


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {"start_islands": num_islands, "transport": "loopback", "wait_seconds": GUARD_SECONDS}
    return OuterConfig(**{**fields, **changes})


def model() -> dict[str, torch.Tensor]:
    """Params of three layers, a bias and a variance that rounds average, and a buffer of each
    island's own.
    """
    return layered() | {BIAS: torch.zeros(8), RUNNING: torch.ones(5), OWN: torch.zeros(3)}


def named(island: Island) -> dict[str, torch.Tensor]:
    """This island's tensors by name, copied."""
    return {
        held.name: v.clone().flatten()
        for held, v in zip(island.params.slices, island.params.values, strict=True)
    }


def buffers(island: Island) -> torch.Tensor:
    """The averaged buffers."""
    found = named(island)
    return torch.cat([found[BIAS], found[RUNNING]])


def rounds(
    num_rounds: int, island: Island
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]]:
    """Of each round: what this island had before and after it, and the digest."""
    island.outer.begin()
    found = []
    for number in range(num_rounds):
        island.train(number)
        before = named(island)
        report = island.commit(TOKENS[island.name])
        found.append((before, named(island), report.digest))
    return found


def by_hand(values: list[torch.Tensor], tokens: list[int]) -> torch.Tensor:
    total = torch.zeros_like(values[0])
    for each, weight in zip(values, tokens, strict=True):
        total += each * torch.tensor(weight / sum(tokens))
    return total


@pytest.mark.parametrize("codec", ["fp32", "int4", "topk"])
@pytest.mark.parametrize("rule", ["mean", "radial"])
def test_a_buffer_becomes_the_token_weighted_mean_whatever_steps_and_encodes_params(
    codec: str, rule: str
) -> None:
    optimizer = OuterOptimizerConfig(lr=0.3, momentum=0.9)
    made = config(
        3, optimizer=optimizer, codec=codec, merge={"rule": rule}, coding={"feedback": 0.9}
    )
    found = run_islands(dict.fromkeys("abc", partial(rounds, 4)), made, model=model)
    for number in range(4):
        for name in (BIAS, RUNNING):
            mean = by_hand([found[i][number][0][name] for i in "abc"], [TOKENS[i] for i in "abc"])
            for island in "abc":
                assert torch.equal(found[island][number][1][name], mean), (number, name)
        assert len({found[island][number][2] for island in "abc"}) == 1


def test_params_go_on_as_without_buffers_and_the_bytes_are_those_of_the_buffers_in_fp32() -> None:
    def script(island: Island) -> tuple[torch.Tensor, int]:
        island.outer.begin()
        sent = sum(island.round(100).bytes_sent for _ in range(3))
        return torch.cat(
            [values for name, values in named(island).items() if "@" not in name]
        ), sent

    made = config(2, codec="int8")
    params, with_buffers = run_islands(dict.fromkeys("ab", script), made, model=model)["a"]
    expected, without = run_islands(dict.fromkeys("ab", script), made, model=layered)["a"]
    assert torch.equal(params, expected)
    assert 0 < with_buffers - without <= 3 * (4 * 13 + 64)


def test_a_digest_covers_averaged_buffers_and_not_an_islands_own() -> None:
    def script(island: Island) -> tuple[str, str, str]:
        island.outer.begin()
        carried = island.outer.replica.carried
        digests = [island.outer.replica._compute_digest(island.outer.replica.ranks)]
        for name in (OWN, BIAS):
            part = next(
                p
                for p in island.outer.replica.space.parts
                if island.outer.replica.space.name_at(p.start) == name
            )
            carried.parts[part.index][0] += 1
            carried._digests.clear()
            digests.append(island.outer.replica._compute_digest(island.outer.replica.ranks))
        return digests[0], digests[1], digests[2]

    first, with_own, with_bias = run_islands({"a": script}, config(1), model=model)["a"]
    assert first == with_own != with_bias


def test_a_buffer_that_no_island_changes_keeps_its_bits() -> None:
    # Of the first two, the sum of the weighted values differs from the value itself.
    value = torch.tensor([1.6885894536972046, 7.2310919761657715, -1e-7, 0.1])

    def script(island: Island) -> torch.Tensor:
        island.outer.begin()
        for _ in range(4):
            island.commit(TOKENS[island.name])
        return named(island)["b@buffer"]

    found = run_islands(
        dict.fromkeys("abc", script),
        config(3),
        model=lambda: tensors() | {"b@buffer": value.clone()},
    )
    assert all(torch.equal(found[name], value) for name in "abc")


def test_a_mean_stays_within_the_values_that_count() -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), torch.tensor([90.0, 90.0])]
    held = hold_between(torch.tensor([1.0000001, 3.0]), parts, [0.5, 0.5, 0.0])
    assert torch.equal(held, torch.tensor([1.0, 3.0]))


# -- every kind of round ---------------------------------------------------------------------------

KINDS = {
    "plain": {},
    "delayed": {"delay": 3},
    "mixed": {"delay": 2, "mix": 0.5},
    "streaming": {"fragments": 3, "delay": 1},
    "eager": {"delay": 3, "eager": True},
    "with moments": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_equal_everywhere_once_a_round_has_landed(kind: str) -> None:
    made = stream_config(3, rounds=2, **KINDS[kind])

    def script(island: Island) -> list[tuple[torch.Tensor, torch.Tensor, str]]:
        island.outer.begin()
        stream, found = Stream(island, made), []
        for number in range(made.num_rounds):
            for step in range(3):
                island.train(10 * number + step)
                stream.made += TOKENS[island.name]
            given = buffers(island)
            stream.launch()
            island.train(1000 + number)
            stream.land()
            found.append((given, buffers(island), stream.landings[-1].reports[-1].digest))
        return found

    found = run_islands(dict.fromkeys("abc", script), made, model=model)
    for number in range(made.num_rounds):
        assert len({found[island][number][2] for island in "abc"}) == 1
        mean = by_hand(
            [found[island][number][0] for island in "abc"], [TOKENS[island] for island in "abc"]
        )
        # With fragments, the bias goes with the params of its layer 1, and the variance with those
        # of layer 2.
        sent = (
            [[False] * 8 + [True] * 5, [True] * 8 + [False] * 5, [False] * 13][number % 3]
            if made.fragments > 1
            else 13 * [True]
        )
        is_sent = torch.tensor(sent)
        for island in "abc":
            after = found[island][number][1]
            torch.testing.assert_close(after[is_sent], mean[is_sent], rtol=1e-6, atol=1e-7)
            assert torch.equal(after[is_sent], found["a"][number][1][is_sent])


@pytest.mark.parametrize("delayed", [False, True])
def test_buffers_of_an_observer_are_the_committed_ones_after_each_round_it_hears_of(
    delayed: bool,
) -> None:
    optimizer = OuterOptimizerConfig(delayed=delayed)
    made = stream_config(2, inner_steps=2, wait_for="quorum", rounds=50, optimizer=optimizer)
    heard, over = threading.Barrier(2), threading.Event()

    def contributor(island: Island) -> tuple[str, torch.Tensor]:
        trainee = Trainee(island)
        trainee.begin()
        trainee.run(lambda: len(trainee.heard) >= 3)
        found = island.outer.digest, buffers(island)
        heard.wait(GUARD_SECONDS)
        assert over.wait(GUARD_SECONDS)
        return found

    def observer(island: Island) -> tuple[str, torch.Tensor]:
        trainee = Trainee(island, step_seconds=1000.0)
        trainee.begin()
        trainee.step()
        while len(trainee.heard) < 3:
            trainee.land()
        assert not any(one.is_given for one in trainee.heard)
        found = island.outer.digest, buffers(island)
        heard.wait(GUARD_SECONDS)
        over.set()
        return found

    found = run_islands({"a": contributor, "b": observer}, made, model=model)
    assert found["a"][0] == found["b"][0] and torch.equal(found["a"][1], found["b"][1])
    assert found["a"][1].abs().max() > 0


def test_gossip_gives_a_group_one_value() -> None:
    made = config(2, gossip={}, rounds=3, inner_steps=2)

    def script(island: Island) -> list[tuple[torch.Tensor, torch.Tensor]]:
        island.outer.begin()
        found = []
        for number in range(3):
            island.train(number)
            given = buffers(island)
            island.outer.launch(100)
            island.outer.land()
            found.append((given, buffers(island)))
        return found

    found = run_islands(dict.fromkeys("ab", script), made, model=model)
    for (mine, after), (theirs, their_after) in zip(found["a"], found["b"], strict=True):
        assert torch.equal(after, their_after) and torch.equal(after, (mine + theirs) / 2)


def test_global_params_hold_the_committed_buffers() -> None:
    def script(island: Island) -> bool:
        rounds(1, island)
        committed = buffers(island)
        island.train(7)
        local = buffers(island)
        with island.outer.global_params():
            inside = buffers(island)
        return (
            torch.equal(inside, committed)
            and torch.equal(buffers(island), local)
            and not torch.equal(local, inside)
        )

    assert run_islands({"a": script}, config(1), model=model)["a"]


def test_each_layers_buffers_go_with_the_fragment_of_its_params() -> None:
    fragments = [{"layers.0.w", "layers.2.w"}, {"layers.1.w"}, {"embed", "head"}]
    specs = [
        Spec(name, (3,))
        for name in ("layers.2.b@buffer", "layers.1.b@buffer", "b@buffer", "layers.7.b@buffer")
    ]
    found = assign_buffers(specs, fragments)
    assert found == [
        ("layers.2.b@buffer",),
        ("layers.1.b@buffer",),
        ("b@buffer", "layers.7.b@buffer"),
    ]


# -- whoever takes the state -----------------------------------------------------------------------


def test_a_joiner_takes_averaged_buffers_and_a_donors_own_ones() -> None:
    ready_to_join, has_begun = threading.Event(), threading.Event()
    all_old = threading.Barrier(2, ready_to_join.set)

    def old(island: Island) -> tuple[dict[str, torch.Tensor], list[str]]:
        found = rounds(2, island)[-1][1]
        all_old.wait(GUARD_SECONDS)
        assert has_begun.wait(GUARD_SECONDS)
        return found, [island.round(100).digest for _ in range(2)]

    def joiner(island: Island) -> tuple[dict[str, torch.Tensor], list[str]]:
        assert ready_to_join.wait(GUARD_SECONDS)
        island.outer.begin()
        found = named(island)
        has_begun.set()
        return found, [island.round(100).digest for _ in range(2)]

    found = run_islands({"a": old, "b": old, "c": joiner}, config(2), model=model)
    for name in (BIAS, RUNNING):
        assert torch.equal(found["c"][0][name], found["a"][0][name]) and torch.equal(
            found["a"][0][name], found["b"][0][name]
        )
    assert not torch.equal(found["a"][0][OWN], found["b"][0][OWN])
    assert any(torch.equal(found["c"][0][OWN], found[donor][0][OWN]) for donor in "ab")
    assert found["a"][1] == found["b"][1] == found["c"][1]


def test_an_island_that_missed_a_round_keeps_progress_and_own_buffers_but_not_averaged_ones() -> (
    None
):
    alone, taken = threading.Event(), threading.Event()
    both = threading.Barrier(2)

    def quick(island: Island) -> tuple[torch.Tensor, str]:
        rounds(4, island)
        both.wait(GUARD_SECONDS)
        island.outer.pace.deadlines.initial_seconds = 0.0
        island.train(4)
        assert island.commit().participants == ["a"]  # b is not ready: it is given up
        committed = buffers(island)
        alone.set()
        assert taken.wait(GUARD_SECONDS)
        island.outer.pace.deadlines.initial_seconds = GUARD_SECONDS
        return committed, island.commit().digest

    def slow(island: Island) -> tuple[torch.Tensor, str]:
        rounds(4, island)
        both.wait(GUARD_SECONDS)
        island.train(4)
        before = named(island)
        assert alone.wait(GUARD_SECONDS)
        with pytest.raises(CaughtUp) as caught:
            island.attempt(100)
        assert caught.value.is_kept
        assert torch.equal(named(island)[OWN], before[OWN])
        committed = buffers(island)
        taken.set()
        return committed, island.commit().digest

    found = run_islands({"a": quick, "b": slow}, config(2), model=model)
    assert torch.equal(found["a"][0], found["b"][0]) and found["a"][1] == found["b"][1]


@pytest.mark.parametrize("moments", [None, (1, 1)])
def test_a_saved_state_has_the_buffers_and_goes_on(moments: tuple[int, int] | None) -> None:
    made = config(2, moments=moments)
    saved = {}

    def with_moments() -> dict[str, torch.Tensor]:
        kinds = ("exp_avg", "exp_avg_sq") if moments else ()
        return model() | {
            f"{name}@{kind}": torch.zeros_like(v) for kind in kinds for name, v in layered().items()
        }

    def train(island: Island, number: int) -> str:
        for held, values in zip(island.params.slices, island.params.values, strict=True):
            moved = progress(island.name, number, held.name, values)
            values.add_(moved.abs() if held.name.endswith("_sq") else moved)
        return island.commit(100).digest

    def first(island: Island) -> tuple[torch.Tensor, str]:
        island.outer.begin()
        train(island, 0)
        tensors, facts = island.outer.save()
        saved[island.name] = {name: values.clone() for name, values in tensors.items()}, facts
        return buffers(island), train(island, 1)

    def second(island: Island) -> tuple[torch.Tensor, str]:
        restore(island, saved[island.name])
        island.outer.begin()
        return buffers(island), train(island, 1)

    before = run_islands(dict.fromkeys("ab", first), made, model=with_moments)
    after = run_islands(dict.fromkeys("ab", second), made, model=with_moments)
    assert torch.equal(before["a"][0], after["a"][0]) and before["a"][0].abs().max() > 0
    assert before["a"][1] == before["b"][1] == after["a"][1] == after["b"][1]


# -- hostile values --------------------------------------------------------------------------------


class Wrong(NoHooks):
    """An island that sends a wrong payload of its bias: bytes of these values, or too few."""

    def __init__(self, value: float | None) -> None:
        self._value = value

    def payload(self, round_number: int, payload: torch.Tensor) -> torch.Tensor:
        if payload.numel() != 4 * 13:
            return payload
        if self._value is None:
            return payload[:-4]
        wrong = payload.clone()
        wrong.view(torch.float32)[3] = self._value
        return wrong


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_peers_wrong_payload_of_a_buffer_is_refused_by_its_name(value: float | None) -> None:
    both_are_done = threading.Barrier(2)

    def script(island: Island) -> tuple[bool, str]:
        island.outer.begin()
        island.train(0)
        try:
            report = island.attempt(1)
            return report.is_committed, report.cause
        except OuterError as error:
            return False, str(error)
        finally:
            both_are_done.wait(GUARD_SECONDS)

    found = run_islands(
        dict.fromkeys("ab", script), config(2), model=model, hooks={"b": Wrong(value)}
    )
    assert not any(is_committed for is_committed, _ in found.values())
    assert any(re.search(r"island 'b'|52", cause) for _, cause in found.values()), found


def test_an_islands_own_buffer_that_is_not_finite_stops_it_by_name() -> None:
    def script(island: Island) -> str:
        island.outer.begin()
        values = dict(
            zip([held.name for held in island.params.slices], island.params.values, strict=True)
        )
        values[BIAS][2] = torch.nan
        with pytest.raises(OuterError) as caught:
            island.attempt(1)
        return str(caught.value)

    assert BIAS in run_islands({"a": script}, config(1), model=model)["a"]
