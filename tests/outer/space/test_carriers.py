"""The carrier of a part is a rank that holds much of it, and ranks carry about as much as each
other.
"""

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outer.space.carriers import assign_carriers, count_overlaps
from outer.space.holdings import Holdings, pack_slices
from outer.space.layout import Space, matrix_shape
from tests.outer.islands import Held, Spec
from tests.outer.layouts import SHAPES, Layout, four_tiles, random_layout


def find_carriers(space: Space, *layout: list[Held]) -> list[int]:
    holdings = Holdings(space, [pack_slices(slices) for slices in layout])
    return assign_carriers(space, holdings, count_overlaps(space, holdings.rectangles), len(layout))


def find_carriers_by_element(space: Space, layout: Layout) -> list[int]:
    """The same by definition, from each element that each rank holds."""
    holds = np.zeros((len(layout), space.num_elements), bool)
    for rank, slices in enumerate(layout):
        for held in slices:
            shape, start = space.shapes[held.name], space.offsets[held.name]
            matrix = holds[rank, start : start + prod(shape)].reshape(matrix_shape(shape))
            matrix[slice(*held.rows), slice(*held.cols)] = True
    loads, carriers = [0] * len(layout), []
    for part in space.parts:
        held = holds[:, part.start : part.stop].sum(axis=1)
        carrier = min(
            (rank for rank in range(len(layout)) if 2 * held[rank] >= held.max()),
            key=loads.__getitem__,
        )
        loads[carrier] += part.num_elements
        carriers.append(carrier)
    return carriers


@given(
    seed=st.integers(0, 1 << 30),
    num_ranks=st.integers(1, 9),
    part_elements=st.integers(1, 60),
    copies=st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_carriers_are_those_of_the_definition_on_any_mesh(
    seed: int, num_ranks: int, part_elements: int, copies: int
) -> None:
    space = Space([Spec(name, shape) for name, shape in SHAPES.items()], part_elements)
    layout = random_layout(seed, num_ranks) * copies
    assert find_carriers(space, *layout) == find_carriers_by_element(space, layout)


def test_a_part_is_carried_by_the_rank_that_holds_most_of_it() -> None:
    space = Space([Spec("w", (16, 4))], 4)
    first, last = Held("w", (0, 5), (0, 4)), Held("w", (5, 16), (0, 4))
    assert find_carriers(space, [last], [first]) == [1] * 5 + [0] * 11


def test_replicas_share_the_parts_evenly() -> None:
    space = Space([Spec("w", (16, 4))], 4)
    whole = [Held("w", (0, 16), (0, 4))]
    carriers = find_carriers(space, whole, whole, [], whole)
    assert [carriers.count(rank) for rank in range(4)] == [6, 5, 0, 5]


def test_slices_in_any_order_give_the_same_carriers() -> None:
    space = Space([Spec("w", (5, 6))], 4)
    tl, tr, bl, br = four_tiles()
    assert find_carriers(space, [tl, br], [bl, tr]) == find_carriers(space, [br, tl], [tr, bl])


def test_ranks_carry_alike_although_parts_are_larger_than_their_slices() -> None:
    # 40 matrices over 20 ranks, in parts of two slices and a half: some ranks never hold most of a
    # part.
    space = Space([Spec(f"w{i}", (200, 10)) for i in range(40)], 250)
    layout = [
        [Held(f"w{i}", (10 * rank, 10 * rank + 10), (0, 10)) for i in range(40)]
        for rank in range(20)
    ]
    carriers = find_carriers(space, *layout)
    assert {carriers.count(rank) for rank in range(20)} <= {15, 16, 17}
