"""Split layers into pipeline stages, assign stages to ranks and check the number of micro-batches.
No torch.

A rank holds `stages_per_rank` stages. With pp = 2, the ranks of the stages are:

    gpipe, 1f1b              0 1          one stage per rank
    interleaved_1f1b,        0 1 0 1      looped: the stream passes around the ranks
    breadth_first,
    interleaved_zero_bubble
    zbv, dualpipev           0 1 1 0      a V: rank 0 holds both ends
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from inner.config import ParallelConfig, Schedule
from inner.errors import InputError
from inner.flops import LayerCosts
from inner.model.stage import Stage

TORCH_NAMES: dict[Schedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "breadth_first": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Names of the schedules in torch.distributed.pipelining."""

ONE_STAGE_PER_RANK: tuple[Schedule, ...] = ("gpipe", "1f1b")
V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
SPLIT_BACKWARD: tuple[Schedule, ...] = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that compute the gradients of inputs and of weights at different times."""
EQUAL_ROUNDS: tuple[Schedule, ...] = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules that process the micro-batches in equal rounds."""


def plan_stages(parallel: ParallelConfig, costs: LayerCosts, pp: int) -> list[Stage]:
    """Return all stages in the order of the model; each layer is in exactly one. Raises InputError
    with a cure.

    The slowest stage is made as fast as possible. `costs` are those of inner/flops.py; the
    embedding is not counted. With pp = 1 the whole model is one stage, whatever the schedule.

    layers           costs  pp  stages_per_rank  head  ->
         6        all 1      2                1   0.1  3 3
         7        all 1      2                1   0.1  4 3
        16        all 1      4                1   3.7  5 5 5 1
        32        all 1      4                1   1.8  8 8 9 7
         6  1 1 1 3 3 3      2                1   0.1  4 2
    """
    num_layers = len(costs.layers)
    if pp == 1:
        return [Stage(0, range(num_layers), is_first=True, is_last=True)]
    num_stages = pp * _stages_per_rank(parallel)
    if parallel.layers_per_stage is None:
        _check_num_layers(num_layers, num_stages, pp)
        split = _split_evenly if costs.is_even else _split_by_cost
        counts = split(costs, num_stages)
    else:
        counts = _check_split(parallel.layers_per_stage, num_layers, num_stages, pp)
    ends = [sum(counts[: index + 1]) for index in range(num_stages)]
    return [
        Stage(index, range(end - count, end), is_first=index == 0, is_last=index == num_stages - 1)
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def ranks_of_stages(schedule: Schedule, num_stages: int, pp: int) -> list[int]:
    """Return the coordinate on `pp` of each stage."""
    if schedule in V_SHAPED:
        return [min(index, 2 * pp - 1 - index) for index in range(num_stages)]
    return [index % pp for index in range(num_stages)]


def stages_at(stages: Sequence[Stage], stage_ranks: Sequence[int], pp_rank: int) -> list[Stage]:
    """Return the stages of a coordinate on `pp`, in the order of the model."""
    return [stage for stage, rank in zip(stages, stage_ranks, strict=True) if rank == pp_rank]


def check_micro_batches(parallel: ParallelConfig, pp: int, num_micro_batches: int) -> None:
    """Raise InputError if torch's schedule cannot run this number of micro-batches per rank and
    step.

    schedule                                        micro-batches that it needs
    gpipe, breadth_first, zbv                       1 or more
    1f1b                                            at least pp
    dualpipev                                       at least 2 x pp
    interleaved_1f1b, interleaved_zero_bubble       a multiple of the rounds, max(1, micro-batches
                                                    // pp)
    """
    if pp == 1 or _can_run(parallel.schedule, pp, num_micro_batches):
        return
    raise InputError(
        f"island.parallel.schedule: {parallel.schedule} with pp {pp} needs "
        f"{_need(parallel.schedule, pp)} per step on each rank, got {num_micro_batches} "
        "(tokens_per_step / seq_len / micro_batch / data ranks); "
        f"{_micro_batch_cure(parallel.schedule, pp, num_micro_batches)}"
    )


def _stages_per_rank(parallel: ParallelConfig) -> int:
    """Return the configured number of stages per rank, checked against the schedule, or the
    schedule's default.
    """
    got = parallel.stages_per_rank
    if parallel.schedule in ONE_STAGE_PER_RANK and got not in (None, 1):
        raise InputError(
            f"island.parallel.stages_per_rank: {parallel.schedule} needs 1, got {got}; "
            "set it to 1, or island.parallel.schedule to interleaved_1f1b, breadth_first or "
            "interleaved_zero_bubble"
        )
    if parallel.schedule in V_SHAPED and got not in (None, 2):
        raise InputError(
            f"island.parallel.stages_per_rank: {parallel.schedule} needs 2, one on each leg of its "
            f"V, got {got}; set it to 2, or island.parallel.schedule to interleaved_zero_bubble"
        )
    return got or (1 if parallel.schedule in ONE_STAGE_PER_RANK else 2)


def _check_num_layers(num_layers: int, num_stages: int, pp: int) -> None:
    if num_layers < num_stages:
        per_rank = num_stages // pp
        raise InputError(
            f"model.num_layers ({num_layers}) must be at least the pipeline's stages: "
            f"island.mesh.pp ({pp}) x "
            f"island.parallel.stages_per_rank ({per_rank}) = {num_stages}; set island.mesh.pp to "
            f"{max(1, num_layers // per_rank)} or less, or model.num_layers to {num_stages} or more"
        )


def _split_evenly(costs: LayerCosts, num_stages: int) -> list[int]:
    """Return the number of layers of each stage, for layers that cost the same. Each layer goes to
    the lightest stage, so that the largest load is smallest.
    """
    last = num_stages - 1
    layers = [1] * num_stages
    loads = [1 + costs.head * (index == last) for index in range(num_stages)]
    for _ in range(len(costs.layers) - num_stages):
        # Among equally light stages take the last, which has fewer micro-batches in flight.
        lightest = min(range(num_stages), key=lambda index: (loads[index], -index))
        layers[lightest] += 1
        loads[lightest] += 1
    return layers


def _split_by_cost(costs: LayerCosts, num_stages: int) -> list[int]:
    """Return the number of layers of each stage, for layers that cost differently. The largest load
    is smallest; of the splits with this load, one whose loads are about even is taken.
    """
    num_layers = len(costs.layers)
    before = [0.0, *accumulate(costs.layers)]
    # By number of layers: the best split of the first layers over the stages so far, as its largest
    # load, the sum of its squared loads, and its layers by stage.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(num_stages):
        head = costs.head if stage == num_stages - 1 else 0.0
        extended: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(stage + 1, num_layers - (num_stages - 1 - stage) + 1):
            choices = []
            for begin, (largest, squares, counts) in best.items():
                if begin < end:
                    load = before[end] - before[begin] + head
                    choices.append(
                        (max(largest, load), squares + load * load, [*counts, end - begin])
                    )
            extended[end] = min(choices)
        best = extended
    return best[num_layers][2]


def _check_split(counts: tuple[int, ...], num_layers: int, num_stages: int, pp: int) -> list[int]:
    where = f"island.parallel.layers_per_stage: {list(counts)}"
    if len(counts) != num_stages:
        raise InputError(
            f"{where} names {len(counts)} stages, but island.mesh.pp ({pp}) x "
            "island.parallel.stages_per_rank "
            f"({num_stages // pp}) = {num_stages}; name {num_stages}, or leave it out for an even "
            "split"
        )
    if min(counts) < 1:
        raise InputError(
            f"{where} leaves a stage with {min(counts)} layers; every stage needs at least 1"
        )
    if sum(counts) != num_layers:
        raise InputError(
            f"{where} adds up to {sum(counts)}, but the model has {num_layers} layers; "
            f"name {num_layers} layers in all, or leave it out for an even split"
        )
    return list(counts)


def _can_run(schedule: Schedule, pp: int, num_micro_batches: int) -> bool:
    """Return whether the constructors of torch's schedules accept this number of micro-batches."""
    if schedule in EQUAL_ROUNDS:
        return num_micro_batches % max(1, num_micro_batches // pp) == 0
    return num_micro_batches >= _fewest(schedule, pp)


def _fewest(schedule: Schedule, pp: int) -> int:
    return {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)


def _need(schedule: Schedule, pp: int) -> str:
    if schedule in EQUAL_ROUNDS:
        return f"micro-batches that split into (micro-batches // {pp}) equal rounds"
    return f"at least {_fewest(schedule, pp)} micro-batches"


def _micro_batch_cure(schedule: Schedule, pp: int, got: int) -> str:
    """Return factors for the tokens or the micro-batch, with the number of micro-batches that each
    gives.
    """
    below = [number for number in range(1, got) if _can_run(schedule, pp, number)]
    above = next(
        number for number in range(got + 1, got + 2 * pp + 1) if _can_run(schedule, pp, number)
    )
    tokens = " or ".join(
        f"{Fraction(number, got)} (for {number})" for number in [*below[-1:], above]
    )
    # Dividing by pp makes the number of micro-batches a multiple of pp, which every schedule with
    # rounds accepts.
    divisor = next(
        divisor for divisor in range(2, 2 * pp + 1) if _can_run(schedule, pp, got * divisor)
    )
    micro_batch = f"{divisor} (for {got * divisor})"
    return (
        f"multiply optimizer.tokens_per_step by {tokens}, or divide island.micro_batch by "
        f"{micro_batch}"
    )
