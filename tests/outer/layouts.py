"""Random ways to spread a small model over the ranks of an island."""

import random

from outer.space.layout import matrix_shape
from tests.outer.islands import Held

SHAPES = {
    "embed": (13, 6),
    "scale": (7,),
    "conv": (3, 2, 5),
    "bias": (),
    "head": (6, 11),
    "none": (0, 4),
}
Layout = list[list[Held]]


def tiles(
    rng: random.Random, name: str, rows: tuple[int, int], cols: tuple[int, int], cuts: int
) -> list[Held]:
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
    """Slices of each rank: every tile is on one rank or several, and sometimes the last rank has
    none.
    """
    rng = random.Random(seed)
    holding = num_ranks - 1 if num_ranks > 1 and seed % 4 == 0 else num_ranks
    layout: Layout = [[] for _ in range(num_ranks)]
    for name, shape in SHAPES.items():
        num_rows, num_cols = matrix_shape(shape)
        for tile in tiles(rng, name, (0, num_rows), (0, num_cols), rng.randrange(4)):
            for rank in rng.sample(range(holding), rng.randint(1, holding)):
                layout[rank].append(tile)
    return layout


def four_tiles() -> list[Held]:
    """A matrix w of 5 x 6, cut after two rows and two columns."""
    return [Held("w", rows, cols) for rows in ((0, 2), (2, 5)) for cols in ((0, 2), (2, 6))]
