"""The assignment of parameters to fragments, and the schedule of fragments."""

from collections import Counter
from itertools import pairwise

import pytest

from outer.config import OuterConfig
from outer.errors import InputError
from outer.space.fragments import FragmentSchedule, assign_fragments, build_part_groups
from outer.space.layout import Space
from tests.outer.islands import Spec
from tests.outer.streams import FRAGMENTS, config, layered, specs


@pytest.mark.parametrize("inner_steps,fragments", [(1, 1), (7, 3), (12, 4), (5, 5), (100, 9)])
def test_every_fragment_is_sent_exactly_once_in_inner_steps(
    inner_steps: int, fragments: int
) -> None:
    schedule = FragmentSchedule(inner_steps, fragments)
    sent = [(r % fragments, schedule.end(r)) for r in range(4 * fragments)]
    for fragment in range(fragments):
        steps = [step for f, step in sent if f == fragment]
        assert [b - a for a, b in pairwise(steps)] == [inner_steps] * 3
    assert sent[-1][1] == 4 * inner_steps
    assert min(schedule.steps(r) for r in range(4 * fragments)) >= 1


@pytest.mark.parametrize("pattern", ["strided", "sequential", "balanced"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_parameter_is_in_exactly_one_fragment(pattern: str, count: int) -> None:
    found = assign_fragments(specs(), config(1, fragments=count, fragment_pattern=pattern))
    assert Counter(name for names in found for name in names) == Counter(layered().keys())
    assert all(found)


def test_strided_takes_every_nth_layer_sequential_neighbours_and_both_the_rest_last() -> None:
    strided = assign_fragments(specs(), config(1, fragments=3))
    assert [sorted(names) for names in strided] == [sorted(names) for names in FRAGMENTS]
    sequential = assign_fragments(specs(), config(1, fragments=3, fragment_pattern="sequential"))
    assert sequential == [{"layers.0.w"}, {"layers.1.w", "layers.2.w"}, {"embed", "head"}]


def test_balanced_fragments_are_at_most_four_thirds_of_the_mean_when_units_allow() -> None:
    names = [Spec(f"layers.{i}.w", (100 + 7 * i, 10)) for i in range(17)]
    found = assign_fragments(names, config(1, fragments=4, fragment_pattern="balanced"))
    sizes = [sum(spec.shape[0] for spec in names if spec.name in fragment) for fragment in found]
    assert max(sizes) <= sum(sizes) / 4 * 4 / 3


def test_more_fragments_than_the_model_has_layers_is_an_error_that_says_how_many_fit() -> None:
    with pytest.raises(
        InputError, match=r"outer.fragments: got 7, .* 3 layers .* set outer.fragments=4 or lower"
    ):
        assign_fragments(specs(), config(1, fragments=7))


@pytest.mark.parametrize(
    "values,text",
    [
        ({"inner_steps": 4, "fragments": 5}, "lower fragments or raise inner_steps"),
        ({"inner_steps": 8, "fragments": 4, "delay": 3}, "set delay to 2 or less"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_the_cure(
    values: dict[str, int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        OuterConfig(**values)


def test_no_part_has_parameters_of_two_fragments() -> None:
    made = config(1, fragments=3)
    space = Space(specs(), 16, 4, build_part_groups(specs(), made, splits_fine=False))
    for part in space.parts:
        names = {space.name_at(part.start), space.name_at(part.stop - 1)}
        assert names <= set(FRAGMENTS[part.fragment])
    assert sum(part.num_elements for part in space.parts) == space.num_elements


def test_a_config_counts_rounds_of_all_fragments() -> None:
    assert config(1, fragments=3).num_rounds == 9
