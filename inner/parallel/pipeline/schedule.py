"""What each rank of a pipeline does in which order, how long that takes, what it keeps, and a picture of it.

The order is torch's own; only reading it imports torch. The simulation knows durations and dependencies, nothing else.
"""

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from inner.config import Schedule
from inner.parallel.stages import SINGLE, TORCH_NAMES, stages_of_rank

Kind = Literal["forward", "backward", "input_backward", "weight_backward"]
"""A backward is whole, or split into the gradient of its input, for which others wait, and those of its weights."""

Product = tuple[Literal["activation", "gradient", "weights"], int, int]
"""What an action leaves for others, by stage and micro-batch: its output, the gradient of its input, or nothing."""

_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "input_backward", "W": "weight_backward"}
_MARKS: dict[Kind, str] = {"forward": ">", "backward": "<", "input_backward": "<", "weight_backward": "="}
_LEGEND = (
    "> forward   < backward   = gradients of weights alone   . idle   0 1 2 micro-batches   a b c stages of a rank"
)


class Action(NamedTuple):
    """One micro-batch through one stage, there or back."""

    kind: Kind
    stage: int
    micro_batch: int


class Span(NamedTuple):
    """When a rank does an action."""

    rank: int
    start: float
    stop: float
    action: Action


@dataclass(frozen=True)
class Simulation:
    """One inner step of a pipeline, in the unit of the durations given. Lists are by coordinate on `pp`."""

    timeline: list[Span]
    """In the order of their starts."""
    makespan: float
    """From the first start to the last stop."""
    busy: list[float]
    """Time in actions."""
    peak_live: list[int]
    """Most forwards at once whose backward, weights included, has not run; each in one stage.

    Over the stages of a rank it counts micro-batches of all the layers that the rank holds.
    """

    @property
    def bubbles(self) -> list[float]:
        """Idle time over busy time of each rank."""
        return [self.makespan / busy - 1 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """Idle time over busy time of all ranks: the overhead over a pipeline that never waits.

        (p - 1) / (v m) for 1F1B of p ranks, v stages each and m micro-batches (2104.04473, section 2.2).
        """
        return self.makespan * len(self.busy) / sum(self.busy) - 1


def actions(schedule: Schedule, pp: int, num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """What torch's schedule does, by coordinate on `pp`, in order. check_micro_batches() says which numbers it takes.

    DualPipeV's overlapped pairs are a forward and then a backward: so does torch's runtime execute them.
    """
    if schedule == "1f1b":
        # torch's pipeline_order for it is not what torch runs: the last rank's micro-batches are off by one.
        return [_one_forward_one_backward(rank, pp, num_micro_batches) for rank in range(pp)]
    order = _torch_order(schedule, pp, num_stages, num_micro_batches)
    return [[action for entry in order[rank] if entry is not None for action in _read(entry)] for rank in range(pp)]


def simulate(
    orders: list[list[Action]], forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0
) -> Simulation:
    """Each action as early as its rank is free and what it needs has arrived; `orders` as from actions().

    Durations are of one micro-batch in one stage; a half of a split backward takes half of `backward`. `transfer` is
    how long an activation or a gradient travels between ranks; it keeps neither busy.
    """
    durations = {"forward": forward, "backward": backward}
    owner = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    produced: dict[Product, float] = {}
    free = [0.0] * len(orders)
    timeline: list[Span] = []

    def start_of(rank: int, action: Action) -> float | None:
        """When it can start; None: what it needs has no time yet."""
        needs = _needs(action, last=max(owner))
        if any(need not in produced for need in needs):
            return None
        return max([free[rank], *(produced[need] + transfer * (owner[need[1]] != rank) for need in needs)])

    waiting = [deque(order) for order in orders]
    while any(waiting):
        num_done = len(timeline)
        for rank, queue in enumerate(waiting):
            while queue and (start := start_of(rank, queue[0])) is not None:
                action = queue.popleft()
                free[rank] = produced[_product(action)] = start + durations.get(action.kind, backward / 2)
                timeline.append(Span(rank, start, free[rank], action))
        assert len(timeline) > num_done, f"the ranks wait for each other: {[queue[0] for queue in waiting if queue]}"
    timeline.sort(key=lambda span: (span.start, span.rank))
    busy = [sum(span.stop - span.start for span in timeline if span.rank == rank) for rank in range(len(orders))]
    return Simulation(timeline, max(free), busy, [_peak_live(order) for order in orders])


def draw(simulation: Simulation, width: int) -> str:
    """A line for each rank, time to the right, and a legend. Times fit into `width` columns; the legend may be longer.

    Micro-batch 3 is `3>` forward, `3<<<` backward and `3=` where gradients of weights are left; in the rank's second
    stage `b3>`. Where that does not fit, letters go first, then numbers, then actions shorter than a column.
    """
    ranks = range(len(simulation.busy))
    heads = [f"rank {rank} |".rjust(len(f"rank {ranks[-1]} |")) for rank in ranks]
    labels, scale = _labels(simulation.timeline, max(0, width - len(heads[0]) - 1) / simulation.makespan)
    lines = [["."] * round(simulation.makespan * scale) for _ in ranks]
    for span, label in zip(simulation.timeline, labels, strict=True):
        start, stop = round(span.start * scale), round(span.stop * scale)
        mark = _MARKS[span.action.kind]
        # Rounding can make a span too narrow for its number, and half a number would be a wrong one.
        text = label if len(label) < stop - start else ""
        lines[span.rank][start:stop] = text.ljust(stop - start, mark)
    rows = [f"{head}{''.join(line)}|" for head, line in zip(heads, lines, strict=True)]
    return "\n".join([*rows, _LEGEND])


def _torch_order(schedule: Schedule, pp: int, num_stages: int, num_micro_batches: int) -> dict[int, list[Any]]:
    """torch's pipeline_order: by rank, its actions and None where it expects to wait."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind: Any = get_schedule_class(TORCH_NAMES[schedule])
    # All that constructors read of a stage: no modules, no process group.
    stages = [
        SimpleNamespace(stage_index=index, num_stages=num_stages, group_size=pp, group_rank=0, submod=None)
        for index in stages_of_rank(schedule, num_stages, pp, rank=0)
    ]
    return kind(stages[0] if schedule in SINGLE else stages, num_micro_batches).pipeline_order


def _read(entry: Any) -> list[Action]:
    """Our actions for one of torch's; none for what only communicates."""
    return [
        Action(_KINDS[part.computation_type.value], part.stage_index, part.microbatch_index)
        for part in entry.sub_actions or (entry,)
        if part.computation_type.value in _KINDS
    ]


def _one_forward_one_backward(rank: int, pp: int, num_micro_batches: int) -> list[Action]:
    """As Schedule1F1B runs it: pp - rank forwards ahead, then in turns."""
    forwards = [Action("forward", rank, number) for number in range(num_micro_batches)]
    backwards = [Action("backward", rank, number) for number in range(num_micro_batches)]
    ahead = min(pp - rank, num_micro_batches)
    turns = [action for pair in zip(backwards, forwards[ahead:], strict=False) for action in pair]
    return forwards[:ahead] + turns + backwards[num_micro_batches - ahead :]


def _product(action: Action) -> Product:
    if action.kind == "forward":
        return "activation", action.stage, action.micro_batch
    return "weights" if action.kind == "weight_backward" else "gradient", action.stage, action.micro_batch


def _needs(action: Action, last: int) -> list[Product]:
    """Without which an action cannot start; `last` is the index of the last stage."""
    kind, stage, number = action
    if kind == "forward":
        return [("activation", stage - 1, number)] if stage > 0 else []
    if kind == "weight_backward":
        return [("gradient", stage, number)]
    return [("activation", stage, number), *([("gradient", stage + 1, number)] if stage < last else [])]


def _peak_live(order: list[Action]) -> int:
    live = peak = 0
    for action in order:
        live += {"forward": 1, "input_backward": 0}.get(action.kind, -1)
        peak = max(peak, live)
    return peak


def _labels(timeline: list[Span], most: float) -> tuple[list[str], float]:
    """The richest label for each span that fits with a mark behind it, and columns per time, at most `most`."""
    shortest = min(span.stop - span.start for span in timeline)
    held = {rank: sorted({span.action.stage for span in timeline if span.rank == rank}) for rank, *_ in timeline}
    numbers = [str(span.action.micro_batch) for span in timeline]
    letters = ["" if len(held[span.rank]) == 1 else _letter(held[span.rank], span.action.stage) for span in timeline]
    both = [letter + number for letter, number in zip(letters, numbers, strict=True)]
    nothing = [""] * len(timeline)
    for labels in (both, numbers, nothing):
        scale = (max(map(len, labels)) + 1) / shortest
        if scale <= most:
            return labels, scale
    return nothing, most


def _letter(held: list[int], stage: int) -> str:
    return chr(ord("a") + held.index(stage))
