"""Count FSDP's all-gathers of weights in an inner step, from the order in which stages compute. No
torch here.
"""

from dataclasses import dataclass

from inner.measure.workload import MANAGED_STAGES, Workload
from inner.parallel.pipeline.schedule import Action
from inner.parallel.pipeline.stages import ONE_STAGE_PER_RANK


@dataclass
class StageGathers:
    """Number of all-gathers in one inner step of a stage's embedding, of its root, and of each
    group of one of its layers, see Workload.
    """

    embedding: int = 0
    root: int = 0
    block: int = 0


def count_gathers(work: Workload, pp_rank: int) -> dict[int, StageGathers]:
    """Return the number of all-gathers of each stage of a pipeline coordinate, by stage index.

    A forward or backward gathers the weights that it needs and that are not already gathered. The
    weights of a block and of the embedding are freed after their forward under ZeRO-3, after their
    backward (in a pipeline and with ZeRO-1 only after the last backward), and when their stage is
    not among the next to compute. The backward of the embedding needs no weights.
    """
    order = work.orders[pp_rank]
    is_pipeline = work.degrees.pp > 1
    is_managed = is_pipeline and work.parallel.schedule not in ONE_STAGE_PER_RANK
    gathers = {stage.index: StageGathers() for stage in work.stages_at(pp_rank)}
    embeddings: set[int] = set()
    roots: set[int] = set()
    blocks: set[int] = set()
    kept: set[int] = set()
    for number, action in enumerate(order):
        scheduled: set[int] = set()
        if is_managed:
            soon = _next_stages(order, number)
            embeddings = embeddings & soon
            roots = roots & soon
            blocks = blocks & soon
            scheduled = soon - kept
            kept = soon
        needed = scheduled | {action.stage}
        to_embed = needed if action.kind == "forward" else scheduled
        for stage in needed:
            gathers[stage].embedding += stage in to_embed - embeddings
            gathers[stage].root += stage not in roots
            gathers[stage].block += stage not in blocks
        embeddings = embeddings | to_embed
        roots = roots | needed
        blocks = blocks | needed
        if action.kind == "forward" and work.frees_after_forward:
            embeddings = embeddings - {action.stage}
            blocks = blocks - {action.stage}
        if action.kind == "backward" and not is_pipeline and not work.parallel.keeps_weights:
            embeddings = set()
            roots = set()
            blocks = set()
    return gathers


def _next_stages(order: list[Action], number: int) -> set[int]:
    """Return the first MANAGED_STAGES different stages of the actions from `number` on."""
    stages: set[int] = set()
    for action in order[number:]:
        stages.add(action.stage)
        if len(stages) == MANAGED_STAGES:
            break
    return stages
