import re
from collections import Counter
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from inner.config import ParallelConfig
from inner.errors import InputError
from inner.parallel.pipeline.schedule import Action, Simulation, draw, rank_actions, simulate
from inner.parallel.pipeline.stages import (
    ONE_STAGE_PER_RANK,
    TORCH_NAMES,
    V_SHAPED,
    check_micro_batches,
    ranks_of_stages,
)


class Case(NamedTuple):
    schedule: str
    pp: int
    stages_per_rank: int
    num_micro_batches: int

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank


def runs(case: Case) -> bool:
    try:
        check_micro_batches(ParallelConfig(schedule=case.schedule), case.pp, case.num_micro_batches)
    except InputError:
        return False
    return True


def degrees(schedule: str) -> tuple[int, ...]:
    if schedule in ONE_STAGE_PER_RANK:
        return (1,)
    return (2,) if schedule in V_SHAPED else (1, 2, 4)


CASES = {
    schedule: [
        case
        for pp in (2, 4, 8)
        for stages_per_rank in degrees(schedule)
        for number in (1, 3, 4, 7, 8, 16, 20)
        if runs(case := Case(schedule, pp, stages_per_rank, number))
    ]
    for schedule in TORCH_NAMES
}


@cache
def simulated(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, transfer: float = 0.0
) -> Simulation:
    return simulate(
        rank_actions(schedule, pp, pp * stages_per_rank, num_micro_batches), transfer=transfer
    )


def run(case: Case) -> Simulation:
    return simulated(*case, transfer=0.25)


# Properties of every schedule


@pytest.mark.parametrize("schedule", TORCH_NAMES)
def test_every_stage_has_one_forward_and_one_backward_of_every_micro_batch(schedule):
    for case in CASES[schedule]:
        orders = rank_actions(case.schedule, case.pp, case.num_stages, case.num_micro_batches)
        seen = Counter(action for order in orders for action in order)
        for stage in range(case.num_stages):
            for number in range(case.num_micro_batches):
                whole, into, weights = (
                    seen.pop(Action(kind, stage, number), 0)
                    for kind in ("backward", "input_backward", "weight_backward")
                )
                assert seen.pop(Action("forward", stage, number)) == 1, case
                assert (whole, into, weights) in ((1, 0, 0), (0, 1, 1)), case
        assert not seen, case


@pytest.mark.parametrize("schedule", TORCH_NAMES)
def test_every_stage_is_run_by_the_rank_that_holds_it(schedule):
    for case in CASES[schedule]:
        owners = ranks_of_stages(case.schedule, case.num_stages, case.pp)
        orders = rank_actions(case.schedule, case.pp, case.num_stages, case.num_micro_batches)
        assert all(
            owners[action.stage] == rank for rank, order in enumerate(orders) for action in order
        ), case


@pytest.mark.parametrize("schedule", [name for name in TORCH_NAMES if name != "1f1b"])
def test_the_order_is_what_torch_hands_to_its_runtime(schedule):
    for case in CASES[schedule]:
        stages = [
            SimpleNamespace(
                stage_index=index,
                num_stages=case.num_stages,
                group_size=case.pp,
                group_rank=0,
                submod=None,
            )
            for index in range(case.stages_per_rank)
        ]
        kind = get_schedule_class(TORCH_NAMES[schedule])
        torchs = kind(
            stages[0] if schedule in ONE_STAGE_PER_RANK else stages, case.num_micro_batches
        )
        order = (
            torchs.pipeline_order
            if schedule in ONE_STAGE_PER_RANK
            else torchs.pipeline_order_with_comms
        )
        # Overlapped pairs are written (0F3;3B1)OVERLAP_F_B; sends, receives and shard actions match
        # nothing.
        theirs = [
            re.findall(r"\d+[FBIW]\d+", " ".join(map(str, order[rank]))) for rank in range(case.pp)
        ]
        letters = {"forward": "F", "backward": "B", "input_backward": "I", "weight_backward": "W"}
        ours = [
            [f"{action.stage}{letters[action.kind]}{action.micro_batch}" for action in order]
            for order in rank_actions(schedule, case.pp, case.num_stages, case.num_micro_batches)
        ]
        assert ours == theirs, case


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "num_micro_batches"), [(2, 2), (2, 5), (4, 4), (4, 8), (4, 11)])
def test_schedules_of_one_stage_are_what_torch_executes(schedule, pp, num_micro_batches):
    for rank in range(pp):
        assert (
            executed(schedule, rank, pp, num_micro_batches)
            == rank_actions(schedule, pp, pp, num_micro_batches)[rank]
        )


def executed(schedule: str, rank: int, pp: int, num_micro_batches: int) -> list[Action]:
    """Calls that torch's step makes on a stage without neighbours."""
    calls: list[Action] = []
    stage = SimpleNamespace(
        num_stages=pp,
        stage_index=rank,
        is_last=rank == pp - 1,
        forward_one_chunk=lambda number, *_, **__: calls.append(Action("forward", rank, number)),
        backward_one_chunk=lambda number, **_: calls.append(Action("backward", rank, number)),
        perform_reduce_grad=lambda _: None,
        **dict.fromkeys(
            ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"),
            lambda _: [],
        ),
    )
    torchs = get_schedule_class(TORCH_NAMES[schedule])(stage, num_micro_batches)
    torchs._initialize_stage = lambda *_: None
    torchs._step_microbatches([()] * num_micro_batches, [{}] * num_micro_batches)
    return calls


# Invariants of the simulation


@pytest.mark.parametrize("schedule", TORCH_NAMES)
def test_no_action_starts_before_its_inputs_have_arrived(schedule):
    for case in CASES[schedule]:
        owners = ranks_of_stages(case.schedule, case.num_stages, case.pp)
        spans = {span.action: span for span in run(case).timeline}

        def gradient(stage: int, number: int, spans: dict = spans) -> Action:
            whole = Action("backward", stage, number)
            return whole if whole in spans else Action("input_backward", stage, number)

        for (kind, stage, number), span in spans.items():
            needs = []
            if kind == "forward" and stage > 0:
                needs = [Action("forward", stage - 1, number)]
            elif kind in ("backward", "input_backward"):
                needs = [Action("forward", stage, number)]
                needs += [gradient(stage + 1, number)] if stage < case.num_stages - 1 else []
            elif kind == "weight_backward":
                needs = [Action("input_backward", stage, number)]
            for need in needs:
                travel = 0.25 if owners[need.stage] != span.rank else 0.0
                assert spans[need].stop + travel <= span.start, (case, span)


@pytest.mark.parametrize("schedule", TORCH_NAMES)
def test_no_action_starts_later_than_possible(schedule):
    for case in CASES[schedule]:
        timeline = run(case).timeline
        stops = {span.stop for span in timeline}
        for span in timeline:
            assert span.start == 0 or span.start in stops or span.start - 0.25 in stops, (
                case,
                span,
            )


@pytest.mark.parametrize("schedule", TORCH_NAMES)
def test_a_rank_does_its_actions_one_after_another_in_their_order(schedule):
    for case in CASES[schedule]:
        orders = rank_actions(case.schedule, case.pp, case.num_stages, case.num_micro_batches)
        for rank, order in enumerate(orders):
            mine = [span for span in run(case).timeline if span.rank == rank]
            assert [span.action for span in mine] == order, case
            assert all(before.stop <= after.start for before, after in pairwise(mine)), case


@pytest.mark.parametrize("schedule", TORCH_NAMES)
def test_busy_time_is_that_of_all_forwards_and_backwards(schedule):
    for case in CASES[schedule]:
        simulation = run(case)
        ideal = 3 * case.stages_per_rank * case.num_micro_batches
        assert simulation.busy == [ideal] * case.pp, case
        assert simulation.bubble == pytest.approx(simulation.makespan / ideal - 1), case


def test_durations_and_transfer_are_those_given():
    timeline = simulate(rank_actions("1f1b", 2, 2, 2), forward=3, backward=5, transfer=0.5).timeline
    times = [[(start, stop) for at, start, stop, _ in timeline if at == rank] for rank in (0, 1)]
    assert times[0] == [(0, 3), (3, 6), (12, 17), (20, 25)]
    assert times[1] == [(3.5, 6.5), (6.5, 11.5), (11.5, 14.5), (14.5, 19.5)]


@pytest.mark.parametrize(
    "kinds", [("backward", "forward"), ("forward", "weight_backward", "input_backward")]
)
def test_an_order_that_waits_for_itself_is_refused(kinds):
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate([[Action(kind, 0, 0) for kind in kinds]])


# Published properties of the schedules


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "breadth_first"])
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("stages_per_rank", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_bubble_is_p_minus_1_over_v_m(schedule, pp, stages_per_rank, rounds):
    bubble = simulated(schedule, pp, stages_per_rank, rounds * pp).bubble
    assert bubble == pytest.approx((pp - 1) / (stages_per_rank * rounds * pp))


@pytest.mark.parametrize("schedule", ONE_STAGE_PER_RANK)
@pytest.mark.parametrize(
    ("pp", "num_micro_batches"), [(2, 2), (2, 7), (4, 4), (4, 9), (8, 8), (8, 20)]
)
def test_the_bubble_of_one_stage_a_rank_is_p_minus_1_over_m(schedule, pp, num_micro_batches):
    bubble = simulated(schedule, pp, 1, num_micro_batches).bubble
    assert bubble == pytest.approx((pp - 1) / num_micro_batches)


def test_the_bubble_shrinks_with_stages_as_published():
    bubbles = [simulated("interleaved_1f1b", 4, stages, 8).bubble for stages in (1, 2, 4)]
    assert bubbles == [0.375, 0.1875, 0.09375]


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_splitting_the_backward_leaves_a_third_of_the_bubble(schedule):
    assert simulated(schedule, 4, 2, 8).bubble == 0.0625


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "expected"),
    [
        ("gpipe", 1, [8, 8, 8, 8]),
        ("breadth_first", 2, [16, 16, 16, 16]),
        ("breadth_first", 4, [32, 32, 32, 32]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved_1f1b", 2, [11, 9, 7, 5]),
        ("interleaved_zero_bubble", 2, [8, 8, 8, 8]),
        ("zbv", 2, [8, 8, 8, 8]),
        ("dualpipev", 2, [9, 9, 9, 9]),
    ],
)
def test_peak_live_of_4_ranks_and_8_micro_batches(schedule, stages_per_rank, expected):
    assert simulated(schedule, 4, stages_per_rank, 8).peak_live == expected


@pytest.mark.parametrize("num_micro_batches", [8, 20])
def test_1f1b_keeps_p_minus_rank_whatever_the_micro_batches(num_micro_batches):
    assert simulated("1f1b", 8, 1, num_micro_batches).peak_live == [8, 7, 6, 5, 4, 3, 2, 1]


def test_a_forward_lives_until_the_gradients_of_its_weights():
    order = [
        Action("forward", 0, 0),
        Action("input_backward", 0, 0),
        Action("forward", 0, 1),
        Action("weight_backward", 0, 0),
        Action("backward", 0, 1),
    ]
    assert simulate([order]).peak_live == [2]


# Drawings


def picture(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, width: int
) -> str:
    return draw(simulated(schedule, pp, stages_per_rank, num_micro_batches), width)


def test_picture_of_1f1b():
    assert picture("1f1b", 4, 1, 8, 80).splitlines() == [
        "rank 0 |0>1>2>3>............0<<<4>1<<<5>2<<<6>3<<<7>4<<<..5<<<..6<<<..7<<<|",
        "rank 1 |..0>1>2>........0<<<3>1<<<4>2<<<5>3<<<6>4<<<7>5<<<..6<<<..7<<<....|",
        "rank 2 |....0>1>....0<<<2>1<<<3>2<<<4>3<<<5>4<<<6>5<<<7>6<<<..7<<<........|",
        "rank 3 |......0>0<<<1>1<<<2>2<<<3>3<<<4>4<<<5>5<<<6>6<<<7>7<<<............|",
        "> forward   < backward   = gradients of weights alone   . idle   0 1 2 micro-batches   a "
        "b c stages of a rank",
    ]


def test_picture_of_breadth_first():
    first, second = picture("breadth_first", 2, 2, 4, 100).splitlines()[:2]
    forward = "a0>a1>a2>a3>b0>b1>b2>b3>"
    backward = "b3<<<<b2<<<<b1<<<<b0<<<<a3<<<<a2<<<<a1<<<<a0<<<<"
    assert first == f"rank 0 |{forward}.........{backward}|"
    assert second == f"rank 1 |...{forward}{backward}......|"


def test_picture_of_a_split_backward():
    assert picture("interleaved_zero_bubble", 2, 1, 4, 80).splitlines()[:2] == [
        "rank 0 |0>1>..0<0=2>1<1=3>2<2=3<3=|",
        "rank 1 |..0>0<1>1<0=2>2<1=3>3<2=3=|",
    ]


def test_a_narrow_picture_drops_letters_then_numbers():
    assert (
        picture("breadth_first", 2, 2, 2, 44).splitlines()[0]
        == "rank 0 |0>1>0>1>......1<<<0<<<1<<<0<<<|"
    )
    assert picture("breadth_first", 2, 2, 2, 26).splitlines()[0] == "rank 0 |>>>>...<<<<<<<<|"


@pytest.mark.parametrize("width", [9, 20, 60, 100, 250])
@pytest.mark.parametrize("schedule", TORCH_NAMES)
def test_pictures_are_as_wide_as_allowed_at_most(schedule, width):
    rows = picture(schedule, 4, degrees(schedule)[-1], 16, width).splitlines()[:-1]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= width


def test_where_columns_are_rounded_numbers_stay_whole_and_marked():
    rows = draw(simulated("1f1b", 4, 1, 12, transfer=0.5), 200).splitlines()[:-1]
    assert len({len(row) for row in rows}) == 1
    assert all(
        re.search(r"\d(?![\d<>])", row.removeprefix(f"rank {rank}")) is None
        for rank, row in enumerate(rows)
    )
