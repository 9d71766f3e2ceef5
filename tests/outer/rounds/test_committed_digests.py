"""The digest that islands vote on is that of the bits which the commit then makes."""

import pytest
import torch

from outer.config import OuterConfig
from outer.space.digest import part_digest
from tests.outer.islands import GUARD_SECONDS, Island, fails_in, run_islands

torch.set_num_threads(1)

ROUNDS = 3
CASES = {
    "fp32": {},
    "int4 with feedback": {"codec": "int4", "coding": {"feedback": 0.9}},
    "topk": {"codec": "topk", "merge": {"rule": "contributors"}},
    "fragments": {"codec": "bf16", "fragments": 2, "inner_steps": 2},
    "no momentum": {"optimizer": {"momentum": 0.0}},
    "delayed": {"optimizer": {"delayed": True}},
    "aligned": {"optimizer": {"align": {"keep": 0.9, "turn": 2.0}}},
}


def hashed_again(island: Island) -> dict[int, bytes]:
    """The digest of each part, from params and momentum as they lie in memory now."""
    carried = island.outer.replica.carried
    pushes = {i: [torch.tensor([float(n)])] if n else [] for i, n in carried.pushes.items()}
    momentum = {
        i: torch.zeros_like(params) for i, params in carried.parts.items()
    } | carried.momentum
    return {
        i: part_digest(params, momentum[i], *pushes.get(i, []))
        for i, params in carried.parts.items()
    }


def rounds(island: Island) -> list[bool]:
    """Whether each attempt was committed; after each of them the digests are compared with the
    bits.
    """
    island.outer.begin()
    outcomes = []
    for number in range(ROUNDS):
        island.train(number)
        while island.outer.position.round == number:
            before = island.outer.digest
            outcomes.append(island.attempt(100).is_committed)
            assert island.outer.replica.carried.digests() == hashed_again(island)
            assert (island.outer.digest != before) == outcomes[-1]
    return outcomes


def layers() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (16, 64), "layers.0.w": (64, 128), "layers.1.w": (64, 128), "norm": (64,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_digest_of_a_commit_is_that_of_its_bits(name: str) -> None:
    fields = {
        "transport": "loopback",
        "start_islands": 2,
        "wait_seconds": GUARD_SECONDS,
        **CASES[name],
    }
    found = run_islands(
        {"a": rounds, "b": rounds}, OuterConfig.model_validate(fields), model=layers
    )
    assert all(outcomes.count(True) == ROUNDS for outcomes in found.values())


def test_an_aborted_attempt_leaves_bits_and_digests_as_they_were() -> None:
    config = OuterConfig(transport="loopback", start_islands=2, wait_seconds=GUARD_SECONDS)
    found = run_islands({"a": rounds, "b": rounds}, config, model=layers, faults={"b": fails_in(1)})
    assert all(outcomes.count(True) == ROUNDS and False in outcomes for outcomes in found.values())
