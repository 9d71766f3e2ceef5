import random
import re
import subprocess
import sys
from itertools import accumulate, product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from inner.config import ParallelConfig
from inner.errors import InputError
from inner.flops import LayerCosts, layer_costs
from inner.model.sizes import PRESETS
from inner.parallel.pipeline.stages import (
    ONE_STAGE_PER_RANK,
    TORCH_NAMES,
    V_SHAPED,
    check_micro_batches,
    plan_stages,
    ranks_of_stages,
)

HEAD_LAYERS = 1.8
"""What the head of 8b costs, in layers."""


def even(num_layers: int, head_layers: float = HEAD_LAYERS) -> LayerCosts:
    return LayerCosts((1.0,) * num_layers, head_layers)


def counts(
    num_layers: int, pp: int, head_layers: float = HEAD_LAYERS, **parallel: object
) -> list[int]:
    costs = even(num_layers, head_layers)
    return [len(stage.layers) for stage in plan_stages(ParallelConfig(**parallel), costs, pp)]


@pytest.fixture(scope="module")
def random_splits() -> list[tuple[int, int, int]]:
    """Random (layers, pp, stages per rank) with at least as many layers as stages."""
    draw = random.Random(5)
    splits = []
    for _ in range(1000):
        pp, stages_per_rank = draw.randint(2, 16), draw.randint(1, 6)
        splits.append((pp * stages_per_rank + draw.randint(0, 130), pp, stages_per_rank))
    return splits


def test_every_layer_is_in_exactly_one_stage_in_order(random_splits):
    for num_layers, pp, stages_per_rank in random_splits:
        parallel = ParallelConfig(schedule="interleaved_1f1b", stages_per_rank=stages_per_rank)
        stages = plan_stages(parallel, even(num_layers), pp)
        assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
        assert all(len(stage.layers) > 0 for stage in stages)


def test_only_the_ends_hold_embedding_and_head(random_splits):
    for num_layers, pp, stages_per_rank in random_splits:
        parallel = ParallelConfig(schedule="breadth_first", stages_per_rank=stages_per_rank)
        stages = plan_stages(parallel, even(num_layers), pp)
        assert [stage.index for stage in stages] == list(range(pp * stages_per_rank))
        assert [stage.index for stage in stages if stage.is_first] == [0]
        assert [stage.index for stage in stages if stage.is_last] == [len(stages) - 1]


@pytest.mark.parametrize("head_layers", [0.01, 0.6, 1.8, 3.7])
def test_no_layer_would_be_better_in_another_stage(random_splits, head_layers):
    for num_layers, pp, stages_per_rank in random_splits:
        parallel = {"schedule": "breadth_first", "stages_per_rank": stages_per_rank}
        split = counts(num_layers, pp, head_layers, **parallel)
        loads = [*split[:-1], split[-1] + head_layers]
        # Of the stages that can give a layer away, none is lighter even with one more than the
        # heaviest is now.
        heaviest = max(
            (load for load, count in zip(loads, split, strict=True) if count > 1), default=0
        )
        assert min(loads) + 1 >= heaviest, split


@pytest.mark.parametrize(
    ("num_layers", "pp", "head_layers", "parallel", "expected"),
    [
        (6, 2, 0.1, {}, [3, 3]),
        (7, 2, 0.1, {}, [4, 3]),
        (6, 4, 0.1, {}, [1, 2, 2, 1]),
        (16, 4, 3.7, {}, [5, 5, 5, 1]),
        (32, 4, 1.8, {}, [8, 8, 9, 7]),
        (8, 2, 1.8, {"schedule": "zbv"}, [2, 2, 3, 1]),
        (4, 4, 3.7, {}, [1, 1, 1, 1]),
        (7, 3, 3.7, {"layers_per_stage": (4, 2, 1)}, [4, 2, 1]),
    ],
)
def test_known_splits(num_layers, pp, head_layers, parallel, expected):
    assert counts(num_layers, pp, head_layers, **parallel) == expected


def slowest(costs: LayerCosts, split: tuple[int, ...]) -> float:
    """The largest cost of a stage, given the number of layers of each."""
    ends = list(accumulate(split))
    loads = [sum(costs.layers[end - count : end]) for end, count in zip(ends, split, strict=True)]
    loads[-1] += costs.head
    return max(loads)


@pytest.mark.parametrize(
    ("layers", "head"),
    [
        ((0.5, 0.5, 0.5, 1.5, 1.5, 1.5), 0.1),
        ((0.2, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1), 3.0),
        ((3.0, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4), 0.0),
        ((1.0, 2.0, 3.0, 1.0, 0.5, 2.5, 0.1, 1.9), 0.7),
    ],
)
def test_of_unequal_layers_no_other_split_has_a_faster_slowest_stage(layers, head):
    costs = LayerCosts(layers, head)
    for pp in (2, 3, 4):
        split = tuple(len(stage.layers) for stage in plan_stages(ParallelConfig(), costs, pp))
        every = [
            each for each in product(range(1, len(layers)), repeat=pp) if sum(each) == len(layers)
        ]
        assert sum(split) == len(layers) and min(split) >= 1
        assert slowest(costs, split) == pytest.approx(min(slowest(costs, each) for each in every))


def test_a_stage_of_cheap_layers_has_more_of_them():
    costs = LayerCosts((0.5,) * 3 + (1.5,) * 3, 0.1)
    assert [len(stage.layers) for stage in plan_stages(ParallelConfig(), costs, 2)] == [4, 2]


def test_layers_of_one_kind_cost_exactly_one_layer():
    for name in ("8b", "qwen3-30b-a3b"):
        assert set(layer_costs(PRESETS[name], 4096, "full").layers) == {1.0}
    costs = layer_costs(PRESETS["deepseek-v3"], 4096).layers
    assert len(set(costs)) == 2 and sum(costs) == pytest.approx(61)
    assert costs[:3] == (costs[0],) * 3 and costs[3:] == (costs[3],) * 58


@pytest.mark.parametrize(
    "parallel", [{}, {"schedule": "zbv"}, {"layers_per_stage": (1, 1), "stages_per_rank": 4}]
)
def test_without_a_pipeline_the_model_is_one_stage(parallel):
    (stage,) = plan_stages(ParallelConfig(**parallel), even(5), 1)
    assert (stage.layers, stage.is_first, stage.is_last) == (range(5), True, True)


@pytest.mark.parametrize(
    ("num_layers", "pp", "parallel", "texts"),
    [
        (
            3,
            4,
            {},
            [
                "model.num_layers (3)",
                "island.mesh.pp (4)",
                "= 4",
                "pp to 3 or less",
                "num_layers to 4 or more",
            ],
        ),
        (
            7,
            4,
            {"schedule": "zbv"},
            ["model.num_layers (7)", "stages_per_rank (2)", "= 8", "pp to 3 or less"],
        ),
        (1, 2, {"schedule": "zbv"}, ["model.num_layers (1)", "pp to 1 or less"]),
        (
            8,
            2,
            {"stages_per_rank": 2},
            ["island.parallel.stages_per_rank", "1f1b", "needs 1, got 2", "interleaved_1f1b"],
        ),
        (
            8,
            2,
            {"schedule": "gpipe", "stages_per_rank": 3},
            ["gpipe", "needs 1, got 3", "breadth_first"],
        ),
        (
            8,
            2,
            {"schedule": "zbv", "stages_per_rank": 1},
            ["zbv", "needs 2", "got 1", "interleaved_zero_bubble"],
        ),
        (
            8,
            2,
            {"schedule": "dualpipev", "stages_per_rank": 4},
            ["dualpipev", "needs 2", "got 4", "set it to 2"],
        ),
        (
            8,
            2,
            {"layers_per_stage": (4, 3)},
            ["layers_per_stage: [4, 3]", "up to 7", "8 layers", "even split"],
        ),
        (
            8,
            2,
            {"layers_per_stage": (4, 3, 1)},
            ["[4, 3, 1]", "names 3 stages", "= 2", "name 2", "even split"],
        ),
        (8, 2, {"layers_per_stage": (8, 0)}, ["[8, 0]", "a stage with 0 layers", "at least 1"]),
    ],
)
def test_an_impossible_split_says_field_value_and_cure(num_layers, pp, parallel, texts):
    with pytest.raises(InputError) as caught:
        plan_stages(ParallelConfig(**parallel), even(num_layers), pp)
    assert [text for text in texts if text not in str(caught.value)] == []


def torch_schedule(schedule: str, pp: int, num_micro_batches: int) -> object:
    """Build torch's schedule of that name without ranks. Raises ValueError if torch cannot run
    it.
    """
    held = 1 if schedule in ONE_STAGE_PER_RANK else 2
    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=pp * held, group_size=pp, group_rank=0, submod=None
        )
        for index in range(held)
    ]
    return get_schedule_class(TORCH_NAMES[schedule])(
        stages if held == 2 else stages[0], num_micro_batches
    )


def accepts(check, *args: object, error: type[Exception]) -> bool:
    try:
        check(*args)
    except error:
        return False
    return True


@pytest.mark.parametrize("schedule", TORCH_NAMES)
def test_micro_batches_are_refused_exactly_where_torch_refuses_them(schedule):
    cases = [(pp, number) for pp in (2, 3, 4, 8) for number in range(1, 27)]
    ours = [
        case
        for case in cases
        if accepts(check_micro_batches, ParallelConfig(schedule=schedule), *case, error=InputError)
    ]
    torchs = [case for case in cases if accepts(torch_schedule, schedule, *case, error=ValueError)]
    assert ours == torchs


@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "dualpipev"]
)
def test_every_cure_for_micro_batches_works(schedule):
    parallel = ParallelConfig(schedule=schedule)
    refused = 0
    for pp in range(2, 9):
        for number in range(1, 40):
            if accepts(check_micro_batches, parallel, pp, number, error=InputError):
                continue
            refused += 1
            with pytest.raises(InputError) as caught:
                check_micro_batches(parallel, pp, number)
            for cured in re.findall(r"\(for (\d+)\)", str(caught.value)):
                check_micro_batches(parallel, pp, int(cured))
    assert refused > 0


def test_micro_batch_errors_name_the_fields_and_by_how_much():
    with pytest.raises(InputError) as caught:
        check_micro_batches(ParallelConfig(schedule="interleaved_1f1b"), 4, 9)
    assert "interleaved_1f1b with pp 4" in str(caught.value)
    assert "got 9" in str(caught.value)
    assert "multiply optimizer.tokens_per_step by 8/9 (for 8) or 10/9 (for 10)" in str(caught.value)
    assert "divide island.micro_batch by 4 (for 36)" in str(caught.value)


@pytest.mark.parametrize("schedule", TORCH_NAMES)
def test_without_a_pipeline_any_number_of_micro_batches_runs(schedule):
    check_micro_batches(ParallelConfig(schedule=schedule), 1, 1)


@pytest.mark.parametrize(
    "schedule", [name for name in TORCH_NAMES if name not in ONE_STAGE_PER_RANK]
)
def test_stages_lie_where_torch_expects_them(schedule):
    for pp in (2, 3, 4, 8):
        theirs = torch_schedule(schedule, pp, 2 * pp).stage_index_to_group_rank
        assert ranks_of_stages(schedule, 2 * pp, pp) == [theirs[stage] for stage in range(2 * pp)]


def test_a_rank_holds_a_column_or_both_legs_of_a_v():
    assert ranks_of_stages("1f1b", 4, 4) == [0, 1, 2, 3]
    assert ranks_of_stages("breadth_first", 12, 4) == [0, 1, 2, 3] * 3
    assert all(ranks_of_stages(schedule, 8, 4) == [0, 1, 2, 3, 3, 2, 1, 0] for schedule in V_SHAPED)


def test_planning_imports_no_torch():
    code = (
        "import sys, inner.parallel.pipeline.stages, inner.parallel.pipeline.schedule; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=180).returncode == 0
