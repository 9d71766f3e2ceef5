"""Redistribution between the slices of a mesh and the parts of the outer loop."""

import pytest
import torch

from outer.space.layout import Space
from outer.space.ranks import RankGroup
from outer.space.redistribute import Redistribution
from tests.harness import run_ranks
from tests.outer.islands import FakeParams, Spec, as_matrix
from tests.outer.layouts import SHAPES, random_layout

torch.set_num_threads(1)


def model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def check_round_trip(rank: int, num_ranks: int, seed: int) -> list[int]:
    """Gather, change the values on the carriers, and scatter. Returns the parts this rank
    carries.
    """
    space = Space([Spec(n, s) for n, s in SHAPES.items()], 1 + seed % 40, 1 + seed % 3)
    before, after = model(seed), model(seed + 1)
    flat_before, flat_after = (
        torch.cat([t.flatten() for t in m.values()]) for m in (before, after)
    )
    layout = random_layout(seed, num_ranks)
    params = FakeParams(before, layout[rank])
    redistribution = Redistribution(
        space, params, RankGroup(None if num_ranks == 1 else torch.distributed.group.WORLD)
    )

    parts = redistribution.gather()
    assert list(parts) == redistribution.own_parts
    for index, values in parts.items():
        part = space.parts[index]
        assert torch.equal(values, flat_before[part.start : part.stop]), (
            f"seed {seed}: part {index}"
        )
        values.copy_(flat_after[part.start : part.stop])

    redistribution.scatter(parts)
    for held, values in zip(params.slices, params.values, strict=True):
        expected = as_matrix(after[held.name])[slice(*held.rows), slice(*held.cols)]
        assert torch.equal(values, expected), f"seed {seed}: {held}"
    return redistribution.own_parts


def check_seeds(rank: int, num_ranks: int, seeds: range) -> list[list[int]]:
    return [check_round_trip(rank, num_ranks, seed) for seed in seeds]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gather_and_scatter_bring_random_slices_to_parts_and_back(num_ranks: int) -> None:
    seeds = range(40)
    by_rank = run_ranks(check_seeds, num_ranks, num_ranks, seeds)
    for seed, carried in zip(seeds, zip(*by_rank, strict=True), strict=True):
        space = Space([Spec(n, s) for n, s in SHAPES.items()], 1 + seed % 40, 1 + seed % 3)
        assert sorted(i for mine in carried for i in mine) == [p.index for p in space.parts]
