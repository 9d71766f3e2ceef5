"""Mesh degrees and the micro-batches of a step."""

import pytest

from inner.config import MeshConfig
from inner.errors import InputError
from inner.mesh import Degrees, accumulation_steps, resolve_degrees


@pytest.mark.parametrize(
    ("config", "num_ranks", "degrees"),
    [
        ({}, 1, Degrees()),
        ({}, 4, Degrees(dp_shard=4)),
        ({"dp_replicate": 2}, 4, Degrees(dp_replicate=2, dp_shard=2)),
        ({"dp_replicate": 4, "dp_shard": 1}, 4, Degrees(dp_replicate=4)),
        ({"pp": 2, "tp": 2}, 8, Degrees(pp=2, dp_shard=2, tp=2)),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}, 32, Degrees(2, 2, 2, 2, 2)),
        ({"pp": 4, "cp": 2, "tp": 8}, 1024, Degrees(pp=4, dp_shard=16, cp=2, tp=8)),
    ],
)
def test_degrees_fill_the_ranks(config: dict[str, int], num_ranks: int, degrees: Degrees) -> None:
    assert resolve_degrees(MeshConfig(**config), num_ranks) == degrees
    assert degrees.num_ranks == num_ranks


@pytest.mark.parametrize(
    ("config", "num_ranks", "texts"),
    [
        (
            {"dp_replicate": 2, "dp_shard": 2},
            6,
            ["dp_replicate 2 x dp_shard 2 = 4", "6 ranks", "dp_shard to 3 or -1"],
        ),
        (
            {"dp_replicate": 2},
            3,
            ["2 does not divide", "the island's 3 ranks", "can be 1 or 3", "multiple of 2"],
        ),
        (
            {"tp": 3},
            8,
            ["tp 3 does not divide", "the island's 8 ranks", "tp can be 1 or 2 or 4 or 8"],
        ),
        ({"pp": 2, "cp": 3}, 8, ["pp 2 x cp 3 = 6", "8 ranks", "multiple of 6"]),
        (
            {"pp": 2, "tp": 2, "dp_shard": 3},
            8,
            ["= 12", "8 ranks", "dp_shard to 2 or -1, or island.ranks to 12"],
        ),
        ({"pp": 16}, 8, ["pp 16", "8 ranks", "pp can be 1 or 2 or 4 or 8"]),
    ],
)
def test_degrees_that_do_not_fit_are_named_with_a_cure(
    config: dict[str, int], num_ranks: int, texts: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        resolve_degrees(MeshConfig(**config), num_ranks)
    assert all(text in str(caught.value) for text in ["island.mesh", *texts]), caught.value


def test_every_rank_has_a_place_of_its_own_and_neighbours_on_tp_are_neighbours() -> None:
    degrees = Degrees(2, 2, 2, 2, 2)
    places = [degrees.coordinates(rank) for rank in range(32)]
    assert len({tuple(place.values()) for place in places}) == 32
    assert places[0] | {"tp": 1} == places[1]
    assert places[0] | {"pp": 1} == places[16]
    assert str(Degrees(pp=2, tp=4)) == "pp2 x tp4"


@pytest.mark.parametrize(
    ("tokens", "seq_len", "micro_batch", "ranks", "count"),
    [(8192, 256, 8, 2, 2), (8192, 256, 8, 4, 1)],
)
def test_tokens_are_spread_over_micro_batches(
    tokens: int, seq_len: int, micro_batch: int, ranks: int, count: int
) -> None:
    assert accumulation_steps(tokens, seq_len, micro_batch, ranks) == count


@pytest.mark.parametrize(("tokens", "cure"), [(10000, "try 8192 or 12288"), (100, "try 4096")])
def test_tokens_that_do_not_divide_name_those_that_do(tokens: int, cure: str) -> None:
    with pytest.raises(InputError) as caught:
        accumulation_steps(tokens, 256, 8, 2)
    assert f"optimizer.tokens_per_step ({tokens})" in str(caught.value)
    assert cure in str(caught.value)
