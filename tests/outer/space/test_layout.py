"""The canonical space: every element is in exactly one part, whatever the mesh."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outer.codecs.choice import build_space
from outer.config import OuterConfig
from outer.space.layout import Space, matrix_shape, rectangles
from outer.space.part_sizes import part_length
from tests.outer.islands import Held, Spec

SHAPES = st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple)


def specs_of(shapes: list[tuple[int, ...]]) -> list[Spec]:
    return [Spec(f"p{i}", shape) for i, shape in enumerate(shapes)]


def matrix_of(space: Space, name: str) -> torch.Tensor:
    """The parameter as a matrix whose values are its indices in the flat vector."""
    shape = space.shapes[name]
    values = torch.arange(prod(shape)) + space.offsets[name]
    return values.view(matrix_shape(shape))


def bounds(draw: st.DrawFn, size: int) -> tuple[int, int]:
    return tuple(sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))))


@st.composite
def held_slices(draw: st.DrawFn) -> tuple[Space, Held]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    space = Space(specs_of(shapes), draw(st.integers(1, 40)), draw(st.integers(1, 7)))
    index = draw(st.integers(0, len(shapes) - 1))
    rows, cols = matrix_shape(shapes[index])
    return space, Held(f"p{index}", bounds(draw, rows), bounds(draw, cols))


@given(shape=SHAPES, start=st.integers(-5, 230), stop=st.integers(-5, 230))
@settings(max_examples=200, deadline=None)
def test_rectangles_cover_a_range_exactly_once_and_in_order(
    shape: tuple[int, ...], start: int, stop: int
) -> None:
    matrix = torch.arange(prod(shape)).view(matrix_shape(shape))
    found = list(rectangles(start, stop, shape))
    covered = [
        i for rows, cols in found for i in matrix[slice(*rows), slice(*cols)].flatten().tolist()
    ]
    assert covered == list(range(max(start, 0), min(stop, prod(shape))))
    assert len(found) <= 3


@given(case=held_slices())
@settings(max_examples=200, deadline=None)
def test_pieces_hold_every_element_of_a_slice_once_at_its_place_in_the_part(
    case: tuple[Space, Held],
) -> None:
    space, held = case
    inside = matrix_of(space, held.name)[slice(*held.rows), slice(*held.cols)]
    covered = []
    for piece in space.pieces(held):
        values = inside[slice(*piece.rows), slice(*piece.cols)]
        rows = torch.arange(values.shape[0]).unsqueeze(1)
        cols = torch.arange(values.shape[1]).unsqueeze(0)
        part = space.parts[piece.part]
        place = piece.offset + rows * piece.stride + cols
        assert torch.equal(place + part.start, values), (
            "an element's place in the part is its place in the flat vector"
        )
        assert int(place.max()) < part.num_elements
        assert piece.num_elements == values.numel() > 0
        covered += values.flatten().tolist()
    assert sorted(covered) == inside.flatten().tolist()


@given(
    shapes=st.lists(SHAPES, max_size=5),
    part_elements=st.integers(1, 300),
    block=st.integers(1, 300),
)
@settings(max_examples=200, deadline=None)
def test_parts_cover_the_flat_vector_at_multiples_of_the_block(
    shapes: list[tuple[int, ...]], part_elements: int, block: int
) -> None:
    space = Space(specs_of(shapes), part_elements, block)
    covered = [i for part in space.parts for i in range(part.start, part.stop)]
    assert covered == list(range(space.num_elements)) and space.num_elements == sum(
        map(prod, shapes)
    )
    assert [part.index for part in space.parts] == list(range(len(space.parts)))
    assert all(part.start % block == 0 for part in space.parts)
    assert all(0 < part.num_elements <= max(part_elements, block) for part in space.parts)


@given(
    num_elements=st.integers(0, 10**7),
    part_elements=st.integers(256, 1 << 20),
    islands=st.integers(1, 300),
)
@settings(max_examples=100, deadline=None)
def test_no_part_is_longer_than_an_island_s_share(
    num_elements: int, part_elements: int, islands: int
) -> None:
    step = part_length(num_elements, part_elements, 256, islands)
    assert step % 256 == 0 and step <= max(part_elements, 256)
    assert step <= num_elements / islands + 256


@pytest.mark.parametrize("islands", [2, 4, 8])
def test_islands_reduce_equally_many_parts_of_a_small_and_of_a_large_model(islands: int) -> None:
    for num_elements in (10**6, 25 * 10**6, 10**9):
        assert -(-num_elements // part_length(num_elements, 1 << 20, 256, islands)) % islands == 0


def test_a_run_may_begin_again_with_fewer_islands_on_the_same_parts() -> None:
    assert len({part_length(10**6, 1 << 20, 256, islands) for islands in range(1, 9)}) == 1


@pytest.mark.parametrize(("islands", "parts"), [(2, 8), (40, 64)])
def test_the_space_of_a_run_has_a_part_for_each_island(islands: int, parts: int) -> None:
    config = OuterConfig(start_islands=islands, codec="fp32")
    assert len(build_space([Spec("w", (parts * 10,))], config).parts) == parts


@pytest.mark.parametrize(
    ("rows", "wanted", "largest"),
    [
        (900_000, None, 1 << 20),
        (1_000_000, None, 1 << 21),
        (8_000_000, None, 1 << 22),
        (8_000_000, 1 << 18, 1 << 18),
    ],
)
def test_a_large_model_is_cut_into_large_parts(rows: int, wanted: int | None, largest: int) -> None:
    space = build_space([Spec("w", (rows, 1000))], OuterConfig(part_elements=wanted))
    assert 0.95 * largest < max(part.num_elements for part in space.parts) <= largest


def test_parts_and_fingerprint_depend_on_names_shapes_and_cuts_alone() -> None:
    shapes = [(4, 5), (3,), ()]
    space = Space(specs_of(shapes), 4)
    assert space.parts == Space(specs_of(shapes), 4).parts
    assert space.fingerprint == Space(specs_of(shapes), 4).fingerprint
    others = [
        Space(specs_of([(5, 4), (3,), ()]), 4),
        Space(specs_of(shapes), 1),
        Space([Spec("q", (4, 5)), Spec("p1", (3,)), Spec("p2", ())], 4),
    ]
    assert space.fingerprint not in {other.fingerprint for other in others}


def test_the_fingerprint_tells_cuts_apart_that_make_equally_many_parts() -> None:
    coarse, fine = Space(specs_of([(1000,)]), 200), Space(specs_of([(1000,)]), 200, 127)
    assert len(coarse.parts) == len(fine.parts)
    assert coarse.fingerprint != fine.fingerprint


@given(shapes=st.lists(SHAPES, min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_name_at_is_the_parameter_that_holds_the_element(shapes: list[tuple[int, ...]]) -> None:
    space = Space(specs_of(shapes), 8)
    expected = [spec.name for spec in specs_of(shapes) for _ in range(prod(spec.shape))]
    assert [space.name_at(i) for i in range(space.num_elements)] == expected
