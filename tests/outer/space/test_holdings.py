"""The slices of an island's ranks cover the model exactly once, or are refused."""

import pytest

from outer.errors import InputError
from outer.space.holdings import Holdings, check_coverage, pack_slices
from outer.space.layout import Space
from tests.outer.islands import Held, Spec
from tests.outer.layouts import four_tiles


def check(space: Space, *layout: list[Held]) -> None:
    check_coverage(space, Holdings(space, [pack_slices(slices) for slices in layout]))


def test_replicas_are_kept_once() -> None:
    space = Space([Spec("w", (5, 6))], 4)
    upper, lower = four_tiles()[:2], four_tiles()[2:]
    holdings = Holdings(space, [pack_slices(slices) for slices in (upper, lower, lower, upper)])
    assert holdings.ranks == [[0, 3], [1, 2]] and len(holdings.rectangles) == 4
    assert [holdings.holders(index) for index in range(4)] == [[0, 3], [0, 3], [1, 2], [1, 2]]


WRONG = {
    "a hole": four_tiles()[:3],
    "an overlap": [*four_tiles(), Held("w", (0, 1), (0, 1))],
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
        check(space, WRONG[kind])


def test_empty_slices_count_for_nothing() -> None:
    space = Space([Spec("w", (5, 6))], 4)
    check(space, four_tiles(), [Held("w", (5, 5), (0, 6)), Held("w", (2, 2), (0, 3))])
