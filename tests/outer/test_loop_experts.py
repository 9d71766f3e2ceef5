"""Experts of a mixture between islands: weights by routed tokens, and rounds without experts, in
each kind of round.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch

from outer.config import OuterConfig
from outer.space.experts import ExpertGroup
from tests.outer.islands import GUARD_SECONDS, Island, Spec, run_islands
from tests.outer.paces import Trainee

torch.set_num_threads(1)

EXPERTS, PER_TOKEN, LAYERS = 4, 2, (0, 1)
TOKENS = {"a": 100, "b": 300, "c": 60}
COUNTS = {"a": (60, 100, 40, 0), "b": (300, 0, 300, 0), "c": (0, 60, 60, 0)}
"""How often each expert of a layer is chosen in a round of an island. Nobody chooses the last
one.
"""
PLAIN = {"lr": 1.0, "momentum": 0.0, "nesterov": False}
ROUTED = {"merge": {"experts": "routed"}, "optimizer": PLAIN}


def config(num_islands: int = 3, **changes: object) -> OuterConfig:
    fields = {
        "start_islands": num_islands,
        "transport": "loopback",
        "wait_seconds": GUARD_SECONDS,
        "rounds": 4,
    }
    return OuterConfig(**{**fields, **changes})


def expert(layer: int, number: int) -> str:
    return f"layers.{layer}.ffn.experts.{number}.up_proj.weight"


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ["embed", *(f"layers.{layer}.wq" for layer in LAYERS)]
    names += [expert(layer, number) for layer in LAYERS for number in range(EXPERTS)]
    return {name: torch.randn(6, 5, generator=generator) for name in names}


def specs() -> list[Spec]:
    return [Spec(name, tuple(values.shape)) for name, values in model().items()]


def named(island: Island) -> dict[str, torch.Tensor]:
    return {
        held.name: v.clone()
        for held, v in zip(island.params.slices, island.params.values, strict=True)
    }


def train(island: Island, counts: Mapping[str, Sequence[int]] = COUNTS) -> dict[str, torch.Tensor]:
    """Fake inner steps and their counts; the local params afterwards."""
    island.train(island.outer.position.round)
    island.outer.count_routed(LAYERS, [counts[island.name]] * len(LAYERS))
    return named(island)


def rounds(
    number: int, island: Island
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]]:
    """Of each round: what this island had before and after it, and the digest."""
    island.outer.begin()
    found = []
    for _ in range(number):
        before = train(island)
        digest = island.commit(TOKENS[island.name]).digest
        found.append((before, named(island), digest))
    return found


def by_hand(
    start: torch.Tensor, local: Mapping[str, torch.Tensor], weights: Mapping[str, int]
) -> torch.Tensor:
    """The params after a step of lr 1 along the weighted mean of global minus local."""
    mean = torch.zeros_like(start)
    for island, values in local.items():
        mean += (start - values) * torch.tensor(weights[island] / max(sum(weights.values()), 1))
    return start - mean


@pytest.mark.parametrize(
    "changes", [{}, {"audit": 1.0}, {"merge": {"experts": "routed", "rule": "radial"}}], ids=str
)
def test_an_expert_becomes_the_mean_weighted_by_the_tokens_sent_to_it(
    changes: dict[str, object],
) -> None:
    made = config(**{**ROUTED, **changes})
    found = run_islands(
        dict.fromkeys("abc", partial(rounds, 2)), made, model=model, experts_per_token=PER_TOKEN
    )
    start = model()
    for number in range(2):
        before = {name: found[name][number][0] for name in "abc"}
        after = {name: found[name][number][1] for name in "abc"}
        for layer in LAYERS:
            for chosen in range(EXPERTS):
                name = expert(layer, chosen)
                weights = {island: COUNTS[island][chosen] for island in "abc"}
                expected = by_hand(start[name], {i: before[i][name] for i in "abc"}, weights)
                if made.merge.rule == "mean":
                    assert torch.equal(after["a"][name], expected), (name, number)
                assert torch.equal(after["a"][name], start[name]) == (chosen == 3), (
                    "nobody has chosen it"
                )
        if made.merge.rule == "mean":
            dense = by_hand(start["embed"], {i: before[i]["embed"] for i in "abc"}, TOKENS)
            assert torch.equal(after["a"]["embed"], dense)
        assert len({found[name][number][2] for name in "abc"}) == 1
        start = after["a"]


def test_experts_of_a_group_share_the_weight_of_all_its_tokens() -> None:
    made = config(**ROUTED, experts={"group": 2})
    found = run_islands(
        dict.fromkeys("abc", partial(rounds, 1)), made, model=model, experts_per_token=PER_TOKEN
    )
    for chosen in range(EXPERTS):
        name, first = expert(1, chosen), chosen // 2 * 2
        weights = {island: sum(COUNTS[island][first : first + 2]) for island in "abc"}
        expected = by_hand(model()[name], {i: found[i][0][0][name] for i in "abc"}, weights)
        assert torch.equal(found["b"][0][1][name], expected)


@pytest.mark.parametrize("merge", ["tokens", "routed"])
def test_experts_are_sent_in_every_second_round_with_all_that_was_trained_since(merge: str) -> None:
    made = config(merge={"experts": merge}, optimizer=PLAIN, experts={"every": 2})
    found = run_islands(
        dict.fromkeys("abc", partial(rounds, 2)), made, model=model, experts_per_token=PER_TOKEN
    )
    for island in "abc":
        before, after, _ = found[island][0]
        assert torch.equal(before[expert(0, 0)], after[expert(0, 0)]), (
            "the island goes on with its own"
        )
        assert not torch.equal(before["embed"], after["embed"])
    weights = TOKENS if merge == "tokens" else {island: COUNTS[island][0] for island in "abc"}
    local = {island: found[island][1][0][expert(0, 0)] for island in "abc"}
    assert torch.equal(
        found["c"][1][1][expert(0, 0)], by_hand(model()[expert(0, 0)], local, weights)
    )
    assert all(len({found[island][number][2] for island in "abc"}) == 1 for number in range(2))


STREAMED = {"fragments": 3, "inner_steps": 6, "experts": {"every": 2}}


@pytest.mark.parametrize(
    "changes",
    [STREAMED, {"fragments": 3, "inner_steps": 6, "delay": 1, "eager": True}, {"codec": "int4"}],
    ids=str,
)
def test_streaming_eager_and_coded_rounds_commit_equal_states(changes: dict[str, object]) -> None:
    made = config(**{"merge": {"experts": "routed"}, **changes})

    def life(island: Island) -> list[str]:
        island.outer.begin()
        digests = []
        for _ in range(6):
            train(island)
            island.outer.launch(TOKENS[island.name])
            island.outer.land()
            digests.append(island.outer.digest)
        assert island.outer.pending.expert_weights[-1] == 0, (
            "the last fragment has just been sent, with its experts"
        )
        return digests

    found = run_islands(dict.fromkeys("abc", life), made, model=model, experts_per_token=PER_TOKEN)
    assert found["a"] == found["b"] == found["c"] and len(set(found["a"])) == 6


def test_counts_are_those_since_the_last_round_that_sent_the_expert_also_after_a_checkpoint() -> (
    None
):
    group = ExpertGroup(1, 0, 1)

    def life(island: Island) -> list[int]:
        outer = island.outer
        outer.begin()
        train(island)
        saved_tensors, facts = outer.save()
        tensors = {name: values.clone() for name, values in saved_tensors.items()}
        found = [outer.pending.counted[group]]
        outer.pending.drop(outer.position)
        found.append(outer.pending.counted[group])
        outer.restore(tensors, facts)
        found.append(outer.pending.counted[group])
        train(island)
        snapshot = outer.pending.snapshot(0, TOKENS["a"] * 2)
        found.append(snapshot.expert_counts[EXPERTS])
        island.commit(TOKENS["a"] * 2)
        return [*found, outer.pending.counted[group]]

    made = config(1, **ROUTED)
    found = run_islands({"a": life}, made, model=model, experts_per_token=PER_TOKEN)
    assert found["a"] == [60, 0, 60, 120, 0]


class CountingTrainee(Trainee):
    def step(self) -> None:
        super().step()
        self.island.outer.count_routed(LAYERS, [COUNTS[self.island.name]] * len(LAYERS))


def test_an_observer_keeps_its_counts_until_it_contributes() -> None:
    made = config(2, **ROUTED, wait_for="quorum", inner_steps=2, rounds=50)
    heard, over = threading.Barrier(2), threading.Event()

    def contributor(island: Island) -> tuple[str, dict[str, torch.Tensor], int]:
        trainee = CountingTrainee(island)
        trainee.begin()
        trainee.run(lambda: len(trainee.heard) >= 3)
        found = (
            island.outer.digest,
            named(island),
            island.outer.pending.counted[ExpertGroup(0, 0, 1)],
        )
        heard.wait(GUARD_SECONDS)
        assert over.wait(GUARD_SECONDS)
        return found

    def observer(island: Island) -> tuple[str, dict[str, torch.Tensor], int]:
        trainee = CountingTrainee(island, step_seconds=1000.0)
        trainee.begin()
        trainee.step()
        while len(trainee.heard) < 3:
            trainee.land()
        found = (
            island.outer.digest,
            named(island),
            island.outer.pending.counted[ExpertGroup(0, 0, 1)],
        )
        heard.wait(GUARD_SECONDS)
        over.set()
        return found

    found = run_islands(
        {"a": contributor, "b": observer}, made, model=model, experts_per_token=PER_TOKEN
    )
    digest, local, _ = found["a"]
    assert found["b"][0] == digest and found["b"][2] == COUNTS["b"][0]
    # Nobody who contributed has chosen the last expert.
    assert torch.equal(local[expert(0, 3)], model()[expert(0, 3)])
    assert not torch.equal(local[expert(0, 0)], model()[expert(0, 0)])
