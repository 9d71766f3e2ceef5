"""Predict the traffic between an island's ranks in one inner step: calls and bytes by mesh axis. No
torch here.
"""

from dataclasses import dataclass

from inner.config.experts import ROUTER_SUMS
from inner.measure.traffic.fsdp_gathers import StageGathers, count_gathers
from inner.measure.traffic.muon import list_exchanges
from inner.measure.workload import FP32, FsdpParamGroup, Workload
from inner.mesh import Degrees
from inner.model.block_params import block_params
from inner.model.stage import Stage

GRADIENT_BYTES = 4
"""Bytes per element of gradients, which are reduced in fp32."""
OTHER = "other"
"""Axis name for groups that do not lie along an axis of the mesh."""
ALL_RANKS = "all ranks"
"""Axis name for the group of all ranks of a mesh with several axes of more than one rank."""
SCALARS = "scalars"
"""Name of collectives of a few bytes, such as losses, norms and counts. They are not predicted."""
SCALARS_BYTES = 64
"""Collectives of at most this size are counted as SCALARS."""
COUNT_BYTES = 8
"""Bytes of a number that all ranks sum in fp64."""


@dataclass(frozen=True, order=True)
class TrafficRow:
    """Traffic that one rank sends along one axis of the mesh by one kind of operation."""

    axis: str
    op: str
    calls: int
    sent_bytes: int


def sent_bytes(op: str, size: int, num_ranks: int) -> int:
    """Return the bytes that one rank sends in one call with `size` bytes of input, in a ring of
    `num_ranks`.

    all_gather                            (n - 1) x size         each piece passes every link but one
    reduce_scatter, all_to_all            (n - 1) / n x size
    all_reduce                            2 (n - 1) / n x size   a reduce-scatter, and an all-gather of its result
    broadcast, reduce, gather, scatter    (n - 1) / n x size     the mean over the ranks
    send                                  size

    No algorithm sends less than a ring; others in NCCL or gloo may send more.
    """
    if op == "send":
        return size
    if op == "all_gather":
        return (num_ranks - 1) * size
    times = 2 if op == "all_reduce" else 1
    return times * (num_ranks - 1) * size // num_ranks


def expected_traffic(work: Workload, pp_rank: int = 0) -> list[TrafficRow]:
    """Return the traffic of a rank at pipeline coordinate `pp_rank` in the forward and backward of
    one inner step.

    Collectives of a few bytes are left out (losses, norms, counts, NorMuon's number per row).
    Muon's traffic is predicted for all matrices in one param group; AdamW and SGD send nothing.
    """
    tally = _Tally(work.degrees)
    gathers = count_gathers(work, pp_rank)
    for stage in work.stages_at(pp_rank):
        _count_fsdp(tally, work, stage, gathers[stage.index])
        _count_tensor(tally, work, stage)
        _count_context(tally, work, stage)
        _count_pipeline(tally, work, stage)
        _count_loads(tally, work, stage)
    _count_replicated(tally, work, work.stages_at(pp_rank))
    _count_routing(tally, work)
    _count_tied(tally, work, pp_rank)
    if work.deals_matrices:
        for exchange in list_exchanges(work, work.stages_at(pp_rank)):
            tally.add(*exchange)
    return tally.rows


class _Tally:
    """Adds up calls and bytes by axis and operation."""

    def __init__(self, degrees: Degrees) -> None:
        self._num_ranks = {axis: getattr(degrees, axis) for axis in ("pp", "dp_replicate", "fsdp", "cp", "tp")}
        self._num_ranks[OTHER] = 2
        self._num_ranks[ALL_RANKS] = degrees.num_ranks
        self._totals: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, axis: str, op: str, calls: int, size: int) -> None:
        """Add `calls` of an operation with `size` bytes of input each."""
        if calls == 0 or size <= SCALARS_BYTES or self._num_ranks[axis] == 1:
            return
        before = self._totals.get((axis, op), (0, 0))
        self._totals[axis, op] = before[0] + calls, before[1] + calls * sent_bytes(op, size, self._num_ranks[axis])

    @property
    def rows(self) -> list[TrafficRow]:
        return [TrafficRow(*key, *total) for key, total in sorted(self._totals.items())]


def _count_fsdp(tally: _Tally, work: Workload, stage: Stage, gathers: StageGathers) -> None:
    """Count FSDP's traffic. Weights are gathered each time after they were freed; gradients are
    reduced over replicas only in the last micro-batch.
    """
    reduces = work.num_micro_batches if work.reduces_each_micro_batch else 1
    num_depths = work.sizes.num_depths * stage.is_last
    groups = [(work.embedding(stage), gathers.embedding, 1), (work.ends(stage), gathers.root, 1)]
    groups += [(group, gathers.block, num_depths) for group in work.depth_groups]
    for has_experts, num_layers in work.sizes.layer_kinds(stage.layers[: len(stage.layers) - num_depths]):
        groups += [(group, gathers.block, num_layers) for group in work.layer_groups(has_experts)]
    for group, count, times in groups:
        shard = group.shard_numel(work.degrees.fsdp)
        tally.add("fsdp", "all_gather", times * count, shard * work.itemsize(group))
        tally.add("fsdp", "reduce_scatter", times * reduces, shard * work.degrees.fsdp * GRADIENT_BYTES)
        tally.add("dp_replicate", "all_reduce", times, shard * GRADIENT_BYTES)


def _count_tensor(tally: _Tally, work: Workload, stage: Stage) -> None:
    """Count tensor parallelism's traffic. The stream is gathered before each pair of matrices, and
    partial sums are scattered after it; the backward does the reverse.
    """
    num_micro_batches = work.num_micro_batches
    num_layers = len(stage.layers)
    piece = work.compute_itemsize * work.sizes.dim * work.stream_tokens
    whole = work.compute_itemsize * work.sizes.dim * work.tokens
    num_depths = work.sizes.num_depths * stage.is_last
    # The repetition of a block stops before its last matrix product, so it skips the last scatter,
    # unless a norm follows, as at an extra depth.
    repeats = num_layers * (work.parallel.recompute == "full")
    scatters_again = repeats + num_depths * (work.parallel.recompute == "full")
    # What the head reads, and what the embedding gives, are each a single call for all depths.
    ends = [count for count in (stage.is_last + num_depths, stage.is_first + num_depths) if count]
    if work.parallel.sequence_parallel:
        tally.add("tp", "all_gather", num_micro_batches * (4 * num_layers + 2 * repeats), piece)
        tally.add("tp", "reduce_scatter", num_micro_batches * (4 * num_layers + scatters_again), whole)
        for count in ends:
            tally.add("tp", "all_gather", num_micro_batches, count * piece)
            tally.add("tp", "reduce_scatter", num_micro_batches, count * whole)
    else:
        tally.add("tp", "all_reduce", num_micro_batches * (4 * num_layers + scatters_again), whole)
        for count in ends:
            tally.add("tp", "all_reduce", num_micro_batches, count * whole)
    if stage.is_last:
        _count_loss(tally, work)


def _count_replicated(tally: _Tally, work: Workload, stages: list[Stage]) -> None:
    """Count the sums over tp of gradients of weights that all its ranks hold: one call after all
    micro-batches.
    """
    sizes = work.sizes
    tp = work.degrees.tp
    splits_stream = work.parallel.splits_stream(tp)
    shapes: list[tuple[int, int]] = []
    for has_experts, count in work.layer_kinds(stages):
        params = block_params(sizes, has_experts=has_experts)
        everywhere = [param for param in params if param.is_on_all_ranks(sizes, tp)]
        # If the stream is whole on each rank, norms see the same values on all ranks and have the
        # same gradients.
        summed = [param for param in everywhere if splits_stream or param.cut != "stream"]
        shapes += [param.rank_shape(sizes, tp) for param in summed] * count
    shapes += [(sizes.dim, 1), *work.joint * sizes.num_depths] * (splits_stream and stages[-1].is_last)
    shard = FsdpParamGroup(tuple(shapes)).shard_numel(work.degrees.fsdp)
    tally.add("tp", "all_reduce", 1, shard * GRADIENT_BYTES)


def _count_loss(tally: _Tally, work: Workload) -> None:
    """Count the loss's traffic. Each chunk of tokens all-reduces the largest logit, then the sums
    of exponentials and of target logits.
    """
    calls = work.num_micro_batches * (1 + work.sizes.num_depths)
    for first in range(0, work.tokens, work.parallel.loss_chunk):
        chunk = min(work.parallel.loss_chunk, work.tokens - first)
        tally.add("tp", "all_reduce", calls, 4 * chunk)
        tally.add("tp", "all_reduce", calls, 8 * chunk)


def _count_context(tally: _Tally, work: Workload, stage: Stage) -> None:
    """Count context parallelism's traffic. Keys and values visit each rank, forward and backward,
    and their fp32 gradients return; ulysses exchanges heads.

    A block that is recomputed repeats its exchange. Documents need no traffic, because every rank
    knows them for all positions.
    """
    backwards = work.num_micro_batches * len(stage.layers)
    forwards = backwards * (1 if work.parallel.recompute == "none" else 2)
    others = work.degrees.cp - 1
    q_numel = work.q_numel
    kv_numel = 2 * work.kv_numel
    itemsize = work.compute_itemsize
    if work.parallel.context == "ring":
        tally.add("cp", "send", (forwards + backwards) * others, kv_numel * itemsize)
        tally.add("cp", "send", backwards * others, kv_numel * GRADIENT_BYTES)
    elif work.parallel.context == "all_gather":
        tally.add("cp", "all_gather", forwards + backwards, kv_numel * itemsize)
        tally.add("cp", "all_to_all", backwards, kv_numel * GRADIENT_BYTES * work.degrees.cp)
    else:
        tally.add("cp", "all_to_all", forwards + backwards, (q_numel + kv_numel) * itemsize)
        tally.add("cp", "all_to_all", forwards + backwards, q_numel * itemsize)


def _count_loads(tally: _Tally, work: Workload, stage: Stage) -> None:
    """Count the sums of the experts' loads over the ranks that share a sequence, of which the
    sequence loss needs one per layer and micro-batch. A repeated forward does not sum again.
    """
    if work.sizes.experts is None or not work.balance.sequence_loss:
        return
    num_layers = dict(work.layer_kinds([stage])).get(True, 0)
    loads = FP32 * work.micro_batch * work.sizes.experts.number
    tally.add("cp", "all_reduce", work.num_micro_batches * num_layers, loads)


def _count_routing(tally: _Tally, work: Workload) -> None:
    """Count the sum over all ranks of what the routers did in a step: counts of each layer's
    experts, and three other numbers (inner/optim/expert_balance.py).
    """
    if work.sizes.experts is None:
        return
    size = COUNT_BYTES * len(work.sizes.expert_layers) * (work.sizes.experts.number + ROUTER_SUMS)
    tally.add(axis_of_all_ranks(work.degrees), "all_reduce", 1, size)


def axis_of_all_ranks(degrees: Degrees) -> str:
    """Return the axis that has all ranks of the mesh, or ALL_RANKS if no single axis has them."""
    axes = ("pp", "dp_replicate", "fsdp", "tp")
    return next((axis for axis in axes if getattr(degrees, axis) == degrees.num_ranks), ALL_RANKS)


def _count_pipeline(tally: _Tally, work: Workload, stage: Stage) -> None:
    """Count the pipeline's traffic. The stream goes to the next stage and its gradient to the
    previous stage, unless both stages are on this rank.
    """
    size = work.compute_itemsize * work.sizes.dim * work.stream_tokens
    for other in (stage.index + 1, stage.index - 1):
        if 0 <= other < len(work.stages) and work.stage_ranks[other] != work.stage_ranks[stage.index]:
            tally.add("pp", "send", work.num_micro_batches, size)


def _count_tied(tally: _Tally, work: Workload, pp_rank: int) -> None:
    """Count the sum of a tied table's gradients over the two ends of a pipeline, which both hold
    the table.
    """
    ends = work.stage_ranks[0], work.stage_ranks[-1]
    if work.sizes.last_stage_embeds and ends[0] != ends[1] and pp_rank in ends:
        shard = work.table.shard_numel(work.degrees.fsdp)
        # With two ranks, the two ends are all ranks of pp.
        tally.add("pp" if work.degrees.pp == 2 else OTHER, "all_reduce", 1, shard * GRADIENT_BYTES)
