"""Order of actions on each rank of a pipeline, a simulation of its time and memory, and a drawing
of it.

The order comes from torch, which is imported only to read it. The simulation uses only durations
and dependencies.
"""

from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from inner.config import Schedule
from inner.parallel.pipeline.stages import ONE_STAGE_PER_RANK, TORCH_NAMES, ranks_of_stages

PipelineOp = Literal["forward", "backward", "input_backward", "weight_backward"]
"""Kinds of actions. A backward is whole, or split into the gradients of the input, for which other
ranks wait, and of the weights."""

Dependency = tuple[Literal["activation", "gradient", "weights"], int, int]
"""Result of an action: kind, stage and micro-batch. Other actions depend on activations and
gradients."""

_KINDS: dict[str, PipelineOp] = {
    "F": "forward",
    "B": "backward",
    "I": "input_backward",
    "W": "weight_backward",
}
_MARKS: dict[PipelineOp, str] = {
    "forward": ">",
    "backward": "<",
    "input_backward": "<",
    "weight_backward": "=",
}
_LEGEND = (
    "> forward   < backward   = gradients of weights alone   . idle   0 1 2 micro-batches   "
    "a b c stages of a rank"
)


class Action(NamedTuple):
    """A forward or backward of one micro-batch through one stage."""

    kind: PipelineOp
    stage: int
    micro_batch: int


class TimedAction(NamedTuple):
    """Start and stop time of an action on a rank."""

    rank: int
    start: float
    stop: float
    action: Action


@dataclass(frozen=True)
class Simulation:
    """One inner step of a pipeline, in the unit of the given durations. Lists are indexed by
    coordinate on `pp`.
    """

    timeline: list[TimedAction]
    """Actions in order of their start."""
    makespan: float
    """Time from the first start to the last stop."""
    busy: list[float]
    """Time spent in actions."""
    peak_live: list[int]
    """For each rank, the largest number of forwards at a time, over all of its stages, whose
    backward with weights has not run."""

    @property
    def bubble(self) -> float:
        """Idle time divided by busy time over all ranks: the overhead compared with a pipeline that
        never waits.

        (p - 1) / (v m) for 1F1B with p ranks, v stages per rank and m micro-batches (2104.04473,
        section 2.2).
        """
        return self.makespan * len(self.busy) / sum(self.busy) - 1


def rank_actions(
    schedule: Schedule, pp: int, num_stages: int, num_micro_batches: int
) -> list[list[Action]]:
    """Return the actions of torch's schedule in order, by coordinate on `pp`. check_micro_batches()
    lists the valid numbers.

    DualPipeV's overlapped pairs become a forward followed by a backward, as torch's runtime
    executes them.
    """
    if schedule == "1f1b":
        # torch does not use its own pipeline_order for 1F1B: there, the last rank's micro-batches
        # are off by one.
        return [_one_forward_one_backward(rank, pp, num_micro_batches) for rank in range(pp)]
    order = _torch_order(schedule, pp, num_stages, num_micro_batches)
    return [
        [
            action
            for entry in order[rank]
            if entry is not None
            for action in _parse_torch_action(entry)
        ]
        for rank in range(pp)
    ]


def simulate(
    orders: list[list[Action]], forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0
) -> Simulation:
    """Run each action as soon as its rank is free and its inputs have arrived; `orders` is from
    rank_actions().

    `forward` and `backward` are durations for one micro-batch in one stage; each half of a split
    backward takes half of `backward`. `transfer` is the time that an activation or gradient travels
    between ranks, during which neither rank is busy.
    """
    durations = {"forward": forward, "backward": backward}
    owner = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    ready_at: dict[Dependency, float] = {}
    free = [0.0] * len(orders)
    timeline: list[TimedAction] = []

    def start_of(rank: int, action: Action) -> float | None:
        """Return the earliest start of an action; None while the time of one of its inputs is
        unknown.
        """
        needs = _dependencies(action, last=max(owner))
        if any(need not in ready_at for need in needs):
            return None
        return max(
            [free[rank], *(ready_at[need] + transfer * (owner[need[1]] != rank) for need in needs)]
        )

    waiting = [deque(order) for order in orders]
    while any(waiting):
        num_done = len(timeline)
        for rank, queue in enumerate(waiting):
            while queue and (start := start_of(rank, queue[0])) is not None:
                action = queue.popleft()
                free[rank] = ready_at[_result(action)] = start + durations.get(
                    action.kind, backward / 2
                )
                timeline.append(TimedAction(rank, start, free[rank], action))
        assert len(timeline) > num_done, (
            f"a deadlock: the ranks wait for each other: {[queue[0] for queue in waiting if queue]}"
        )
    timeline.sort(key=lambda span: (span.start, span.rank))
    busy = [
        sum(span.stop - span.start for span in timeline if span.rank == rank)
        for rank in range(len(orders))
    ]
    return Simulation(timeline, max(free), busy, [_peak_live(order) for order in orders])


def draw(simulation: Simulation, width: int) -> str:
    """Draw a line for each rank, with time to the right, and a legend. Only the legend may exceed
    `width` columns.

    Micro-batch 3 is `3>` forward, `3<<<` backward and `3=` for the gradients of weights alone; in
    the rank's second stage its forward is `b3>`. If space is short, letters are dropped first, then
    numbers, then actions shorter than a column.
    """
    ranks = range(len(simulation.busy))
    heads = [f"rank {rank} |".rjust(len(f"rank {ranks[-1]} |")) for rank in ranks]
    labels, scale = _choose_labels(
        simulation.timeline, max(0, width - len(heads[0]) - 1) / simulation.makespan
    )
    lines = [["."] * round(simulation.makespan * scale) for _ in ranks]
    for span, label in zip(simulation.timeline, labels, strict=True):
        start = round(span.start * scale)
        stop = round(span.stop * scale)
        # Rounding can make an action too narrow for its number. It is then left out, because a
        # truncated number would be wrong.
        text = label if len(label) < stop - start else ""
        lines[span.rank][start:stop] = text.ljust(stop - start, _MARKS[span.action.kind])
    rows = [f"{head}{''.join(line)}|" for head, line in zip(heads, lines, strict=True)]
    return "\n".join([*rows, _LEGEND])


def _torch_order(
    schedule: Schedule, pp: int, num_stages: int, num_micro_batches: int
) -> dict[int, list[Any]]:
    """Return torch's pipeline_order: the actions of each rank, with None at times at which it
    expects to wait.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind: Any = get_schedule_class(TORCH_NAMES[schedule])
    # The constructors read only these fields of a stage, so neither modules nor a process group are
    # needed.
    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=num_stages, group_size=pp, group_rank=0, submod=None
        )
        for index, rank in enumerate(ranks_of_stages(schedule, num_stages, pp))
        if rank == 0
    ]
    return kind(
        stages[0] if schedule in ONE_STAGE_PER_RANK else stages, num_micro_batches
    ).pipeline_order


def _parse_torch_action(entry: Any) -> list[Action]:
    """Convert an action of torch to Actions. The list is empty for pure communication."""
    return [
        Action(_KINDS[part.computation_type.value], part.stage_index, part.microbatch_index)
        for part in entry.sub_actions or (entry,)
        if part.computation_type.value in _KINDS
    ]


def _one_forward_one_backward(rank: int, pp: int, num_micro_batches: int) -> list[Action]:
    """Return the order of Schedule1F1B: pp - rank forwards first, then backward and forward
    alternate.
    """
    forwards = [Action("forward", rank, number) for number in range(num_micro_batches)]
    backwards = [Action("backward", rank, number) for number in range(num_micro_batches)]
    ahead = min(pp - rank, num_micro_batches)
    turns = [action for pair in zip(backwards, forwards[ahead:], strict=False) for action in pair]
    return forwards[:ahead] + turns + backwards[num_micro_batches - ahead :]


def _result(action: Action) -> Dependency:
    if action.kind == "forward":
        return "activation", action.stage, action.micro_batch
    return (
        "weights" if action.kind == "weight_backward" else "gradient",
        action.stage,
        action.micro_batch,
    )


def _dependencies(action: Action, last: int) -> list[Dependency]:
    """Return the results that an action needs before it can start. `last`: index of the last
    stage.
    """
    kind, stage, number = action
    if kind == "forward":
        return [("activation", stage - 1, number)] if stage > 0 else []
    if kind == "weight_backward":
        return [("gradient", stage, number)]
    return [
        ("activation", stage, number),
        *([("gradient", stage + 1, number)] if stage < last else []),
    ]


def _peak_live(order: list[Action]) -> int:
    changes = ({"forward": 1, "input_backward": 0}.get(action.kind, -1) for action in order)
    return max(accumulate(changes, initial=0))


def _choose_labels(timeline: list[TimedAction], max_scale: float) -> tuple[list[str], float]:
    """Return the most detailed labels that fit with a mark after each, and the columns per unit of
    time, at most `max_scale`.
    """
    shortest = min(span.stop - span.start for span in timeline)
    stages = {
        rank: sorted({span.action.stage for span in timeline if span.rank == rank})
        for rank, *_ in timeline
    }
    numbers = [str(span.action.micro_batch) for span in timeline]
    letters = [_letter(stages[span.rank], span.action.stage) for span in timeline]
    both = [letter + number for letter, number in zip(letters, numbers, strict=True)]
    nothing = [""] * len(timeline)
    for labels in (both, numbers, nothing):
        scale = (max(map(len, labels)) + 1) / shortest
        if scale <= max_scale:
            return labels, scale
    return nothing, max_scale


def _letter(stages: list[int], stage: int) -> str:
    return chr(ord("a") + stages.index(stage)) if len(stages) > 1 else ""
