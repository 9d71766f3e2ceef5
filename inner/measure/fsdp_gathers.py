"""How often FSDP gathers weights in an inner step, by the order in which stages compute. Needs no torch."""

from dataclasses import dataclass

from inner.measure.units import Workload
from inner.parallel.schedule import Action
from inner.parallel.stages import SINGLE

MANAGED_STAGES = 3
"""torch's schedules of several stages a rank keep the weights of so many: the next ones to compute."""


@dataclass
class Gathers:
    """All-gathers of one pipeline stage in one inner step."""

    root: int = 0
    """Of the tables and the last norm."""
    block: int = 0
    """Of each layer."""


def count_gathers(work: Workload, pp_rank: int) -> dict[int, Gathers]:
    """By stage of a pipeline coordinate.

    Gathered is what a forward or backward needs and is not there. A block is freed after its forward under ZeRO-3;
    after its backward, but in a pipeline only after the last; and when its stage is not one of the next to compute.
    """
    order = work.orders[pp_rank]
    is_pipeline = work.degrees.pp > 1
    is_managed = is_pipeline and work.parallel.schedule not in SINGLE
    gathers = {stage.index: Gathers() for stage in work.stages_at(pp_rank)}
    roots: set[int] = set()
    blocks: set[int] = set()
    kept: set[int] = set()
    for number, action in enumerate(order):
        needed = {action.stage}
        if is_managed:
            soon = _next_stages(order, number)
            roots &= soon
            blocks &= soon
            needed |= soon - kept
            kept = soon
        for stage in needed:
            gathers[stage].root += stage not in roots
            gathers[stage].block += stage not in blocks
        roots |= needed
        blocks |= needed
        if action.kind == "forward" and work.frees_after_forward:
            blocks.discard(action.stage)
        if action.kind == "backward" and not is_pipeline:
            roots, blocks = set(), set()
    return gathers


def _next_stages(order: list[Action], number: int) -> set[int]:
    """The stages of the actions from `number` on, until there are MANAGED_STAGES."""
    stages: set[int] = set()
    for action in order[number:]:
        stages.add(action.stage)
        if len(stages) == MANAGED_STAGES:
            break
    return stages
