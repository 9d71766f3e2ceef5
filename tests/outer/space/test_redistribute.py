"""Redistribution between the slices of a mesh and the parts of the outer loop."""

import random
from math import prod

import pytest
import torch

from outer.errors import InputError
from outer.space.layout import Space
from outer.space.ranks import RankGroup
from outer.space.redistribute import Redistribution, assign_carriers, check_coverage, find_holders
from tests.harness import run_ranks
from tests.outer.islands import FakeParams, Held, Spec, as_matrix

torch.set_num_threads(1)

SHAPES = {"embed": (13, 6), "scale": (7,), "conv": (3, 2, 5), "bias": (), "head": (6, 11), "none": (0, 4)}
Layout = list[list[Held]]


def model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def tiles(rng: random.Random, name: str, rows: tuple[int, int], cols: tuple[int, int], cuts: int) -> list[Held]:
    """Random rectangles, not always a grid, that cover rows x cols exactly once."""
    axis = rng.choice([rows, cols])
    if cuts == 0 or axis[1] - axis[0] < 2:
        return [Held(name, rows, cols)]
    at = rng.randrange(axis[0] + 1, axis[1])
    halves = [(axis[0], at), (at, axis[1])]
    if axis is rows:
        return [t for half in halves for t in tiles(rng, name, half, cols, cuts - 1)]
    return [t for half in halves for t in tiles(rng, name, rows, half, cuts - 1)]


def random_layout(seed: int, num_ranks: int) -> Layout:
    """Slices of each rank: every tile is on one rank or several, and sometimes the last rank has none."""
    rng = random.Random(seed)
    holding = num_ranks - 1 if num_ranks > 1 and seed % 4 == 0 else num_ranks
    layout: Layout = [[] for _ in range(num_ranks)]
    for name, shape in SHAPES.items():
        for tile in tiles(rng, name, (0, prod(shape[:1])), (0, prod(shape[1:])), rng.randrange(4)):
            for rank in rng.sample(range(holding), rng.randint(1, holding)):
                layout[rank].append(tile)
    return layout


def grid(num_rows: int, num_cols: int, name: str = "w", cut: tuple[int, int] = (2, 2)) -> list[Held]:
    """Four rectangles around the point `cut`."""
    rows, cols = [(0, cut[0]), (cut[0], num_rows)], [(0, cut[1]), (cut[1], num_cols)]
    return [Held(name, r, c) for r in rows for c in cols]


def check_round_trip(rank: int, num_ranks: int, seed: int) -> list[int]:
    """Gather, change the values on the carriers, and scatter. Returns the parts this rank carries."""
    space = Space([Spec(n, s) for n, s in SHAPES.items()], 1 + seed % 40, 1 + seed % 3)
    before, after = model(seed), model(seed + 1)
    flat_before, flat_after = (torch.cat([t.flatten() for t in m.values()]) for m in (before, after))
    layout = random_layout(seed, num_ranks)
    params = FakeParams(before, layout[rank])
    redistribution = Redistribution(space, params, RankGroup(None if num_ranks == 1 else torch.distributed.group.WORLD))

    parts = redistribution.gather()
    assert list(parts) == redistribution.own_parts
    for index, values in parts.items():
        part = space.parts[index]
        assert torch.equal(values, flat_before[part.start : part.stop]), f"seed {seed}: part {index}"
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


def holders(*slices_by_rank: list[Held]) -> dict:
    return find_holders([[(s.name, s.rows, s.cols) for s in slices] for slices in slices_by_rank])


def test_a_part_is_carried_by_the_rank_that_holds_most_of_it() -> None:
    space = Space([Spec("w", (16, 4))], 4)
    first, last = Held("w", (0, 5), (0, 4)), Held("w", (5, 16), (0, 4))
    assert assign_carriers(space, holders([last], [first]), 2) == [1] * 5 + [0] * 11


def test_replicas_share_the_parts_evenly() -> None:
    space = Space([Spec("w", (16, 4))], 4)
    whole = [Held("w", (0, 16), (0, 4))]
    carriers = assign_carriers(space, holders(whole, whole, [], whole), 4)
    assert [carriers.count(rank) for rank in range(4)] == [6, 5, 0, 5]


def test_slices_in_any_order_give_the_same_carriers() -> None:
    space = Space([Spec("w", (5, 6))], 4)
    tl, tr, bl, br = grid(5, 6)
    assert assign_carriers(space, holders([tl, br], [bl, tr]), 2) == assign_carriers(
        space, holders([br, tl], [tr, bl]), 2
    )


WRONG = {
    "a hole": grid(5, 6)[:3],
    "an overlap": [*grid(5, 6), Held("w", (0, 1), (0, 1))],
    # As many elements as there should be, one row twice and one missing.
    "a hole as large as an overlap": [Held("w", (0, 3), (0, 6)), Held("w", (2, 4), (0, 6))],
    "corners in place, the middle twice": [
        Held("w", (0, 5), (0, 6)),
        Held("w", (1, 2), (1, 2)),
        Held("w", (1, 2), (1, 2)),
    ],
    "outside": [Held("w", (1, 6), (0, 6))],
    "nothing": [],
    "another name": [Held("v", (0, 5), (0, 6))],
}


@pytest.mark.parametrize("kind", WRONG)
def test_slices_that_do_not_make_up_the_model_are_refused_by_name(kind: str) -> None:
    space = Space([Spec("w", (5, 6))], 4)
    name = "'v'" if kind == "another name" else "'w'"
    with pytest.raises(InputError, match=name):
        check_coverage(space, holders(WRONG[kind]))


def test_empty_slices_count_for_nothing() -> None:
    space = Space([Spec("w", (5, 6))], 4)
    check_coverage(space, holders(grid(5, 6), [Held("w", (5, 5), (0, 6)), Held("w", (2, 2), (0, 3))]))
