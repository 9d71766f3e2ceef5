"""Mesh degrees and the micro-batches of a step."""

import pytest

from inner.config import MeshConfig
from inner.errors import InputError
from inner.mesh import accumulation, resolve_degrees


@pytest.mark.parametrize(
    ("replicate", "shard", "num_ranks", "degrees"),
    [
        (1, -1, 1, (1, 1)),
        (1, -1, 4, (1, 4)),
        (2, -1, 4, (2, 2)),
        (4, 1, 4, (4, 1)),
        (2, 512, 1024, (2, 512)),
    ],
)
def test_degrees_fill_the_ranks(replicate: int, shard: int, num_ranks: int, degrees: tuple[int, int]) -> None:
    assert resolve_degrees(MeshConfig(dp_replicate=replicate, dp_shard=shard), num_ranks) == degrees


def test_wrong_product_names_both_degrees_and_a_cure() -> None:
    with pytest.raises(InputError) as caught:
        resolve_degrees(MeshConfig(dp_replicate=2, dp_shard=2), 6)
    text = "island.mesh.dp_replicate 2 x dp_shard 2 = 4, but the island has 6 ranks; set dp_shard to 3 or -1"
    assert text in str(caught.value)


@pytest.mark.parametrize("shard", [-1, 2])
def test_replicas_that_do_not_divide_the_ranks_name_what_does(shard: int) -> None:
    with pytest.raises(InputError) as caught:
        resolve_degrees(MeshConfig(dp_replicate=2, dp_shard=shard), 3)
    assert "dp_replicate (2) does not divide the island's 3 ranks" in str(caught.value)
    assert "1 x 3 or 3 x 1" in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "seq_len", "micro_batch", "ranks", "count"), [(8192, 256, 8, 2, 2), (8192, 256, 8, 4, 1)]
)
def test_tokens_are_spread_over_micro_batches(
    tokens: int, seq_len: int, micro_batch: int, ranks: int, count: int
) -> None:
    assert accumulation(tokens, seq_len, micro_batch, ranks) == count


@pytest.mark.parametrize(("tokens", "cure"), [(10000, "try 8192 or 12288"), (100, "try 4096")])
def test_tokens_that_do_not_divide_name_those_that_do(tokens: int, cure: str) -> None:
    with pytest.raises(InputError) as caught:
        accumulation(tokens, 256, 8, 2)
    assert f"optimizer.tokens_per_step ({tokens})" in str(caught.value)
    assert cure in str(caught.value)
