"""Predict the traffic between an island's ranks in one inner step: calls and bytes by mesh axis. No
torch here.
"""

from inner.measure.traffic.experts import (
    RowsOf,
    count_loads,
    count_routing,
    count_rows,
    planned_rows,
)
from inner.measure.traffic.fsdp_gathers import StageGathers, count_gathers
from inner.measure.traffic.muon import list_exchanges
from inner.measure.traffic.rows import ALL_RANKS, COPIES, GRADIENT_BYTES, OTHER, Tally, TrafficRow
from inner.measure.workload import FsdpParamGroup, Workload
from inner.mesh import Degrees
from inner.model.block_params import block_params
from inner.model.stage import Stage


def expected_traffic(
    work: Workload, pp_rank: int = 0, rows_of: RowsOf = planned_rows
) -> list[TrafficRow]:
    """Return the traffic of a rank at pipeline coordinate `pp_rank` in the forward and backward of
    one inner step.

    `rows_of` returns the rows of tokens that travel to experts on other ranks in a stage's layers.
    Collectives of a few bytes are left out (losses, norms, counts, NorMuon's number per row).
    Muon's traffic is predicted for all matrices in one param group; AdamW and SGD send nothing.
    """
    tally = Tally(work.degrees)
    gathers = count_gathers(work, pp_rank)
    for stage in work.stages_at(pp_rank):
        if work.has_whole_weights:
            _count_sums(tally, work, stage)
        else:
            _count_fsdp(tally, work, stage, gathers[stage.index])
        _count_tensor(tally, work, stage)
        _count_context(tally, work, stage)
        _count_pipeline(tally, work, stage)
        count_loads(tally, work, stage)
        count_rows(tally, work, stage, rows_of)
    _count_replicated(tally, work, work.stages_at(pp_rank))
    count_routing(tally, work)
    _count_tied(tally, work, pp_rank)
    if work.deals_matrices:
        for exchange in list_exchanges(work, work.stages_at(pp_rank)):
            tally.add(*exchange)
    return tally.rows


def _count_fsdp(tally: Tally, work: Workload, stage: Stage, gathers: StageGathers) -> None:
    """Count FSDP's traffic. Weights are gathered each time after they were freed; gradients are
    reduced over replicas only in the last micro-batch.
    """
    reduces = work.num_micro_batches if work.reduces_each_micro_batch else 1
    num_depths = work.sizes.num_depths * stage.is_last
    groups = [(work.embedding(stage), gathers.embedding, 1), (work.ends(stage), gathers.root, 1)]
    groups += [(group, gathers.block, num_depths) for group in work.depth_groups]
    for has_experts, num_layers in work.sizes.layer_kinds(
        stage.layers[: len(stage.layers) - num_depths]
    ):
        groups += [(group, gathers.block, num_layers) for group in work.layer_groups(has_experts)]
    for group, count, times in groups:
        shard = group.shard_numel
        tally.add(group.axis, "all_gather", times * count, shard * work.itemsize(group))
        tally.add(
            group.axis, "reduce_scatter", times * reduces, shard * group.num_shards * GRADIENT_BYTES
        )
        tally.add("dp_replicate", "all_reduce", times, shard * GRADIENT_BYTES)


def _count_sums(tally: Tally, work: Workload, stage: Stage) -> None:
    """Count the sums of gradients over replicas with whole weights: a call per bucket, once per
    step.
    """
    for size in work.gradient_buckets(stage):
        tally.add(axis_of_copies(work.degrees), "all_reduce", 1, size)


def axis_of_copies(degrees: Degrees) -> str:
    """Return the axis that has all ranks with the same weights, or ALL_RANKS or COPIES if no single
    axis has them.
    """
    several = ALL_RANKS if degrees.num_copies == degrees.num_ranks else COPIES
    axes = ("dp_replicate", "fsdp")
    return next((axis for axis in axes if getattr(degrees, axis) == degrees.num_copies), several)


def _count_tensor(tally: Tally, work: Workload, stage: Stage) -> None:
    """Count tensor parallelism's traffic. The stream is gathered before each pair of matrices, and
    partial sums are scattered after it; the backward does the reverse.
    """
    num_micro_batches = work.num_micro_batches
    piece = work.compute_itemsize * work.sizes.dim * work.stream_tokens
    whole = work.compute_itemsize * work.sizes.dim * work.tokens
    num_depths = work.sizes.num_depths * stage.is_last
    # At an extra depth a norm follows the last sum over the ranks, so its repetition makes this
    # sum, too.
    gathers = 0
    scatters = reduces = num_depths * (work.parallel.recompute == "full")
    for has_experts, num_layers in work.layer_kinds([stage]):
        pairs = work.num_matrix_pairs(has_experts)
        # The repetition of a block stops before its last sum over the ranks.
        repeats = num_layers * (work.parallel.recompute == "full")
        gathers += 2 * num_layers * pairs + repeats * pairs
        # A norm of its result needs the last product, too.
        is_last_repeated = work.sizes.decoder.norms_outputs
        scatters += 2 * num_layers * pairs + repeats * (
            pairs if is_last_repeated and not has_experts else 1
        )
        # If the stream is whole on each rank, the results of a mixture are put together by a sum.
        sums = pairs + has_experts
        reduces += 2 * num_layers * sums + repeats * (sums if is_last_repeated else sums - 1)
    # What the head reads, and what the embedding gives, are each a single call for all depths.
    ends = [count for count in (stage.is_last + num_depths, stage.is_first + num_depths) if count]
    if work.parallel.splits_stream(work.degrees.tp):
        tally.add("tp", "all_gather", num_micro_batches * gathers, piece)
        tally.add("tp", "reduce_scatter", num_micro_batches * scatters, whole)
        for count in ends:
            tally.add("tp", "all_gather", num_micro_batches, count * piece)
            tally.add("tp", "reduce_scatter", num_micro_batches, count * whole)
    else:
        tally.add("tp", "all_reduce", num_micro_batches * reduces, whole)
        for count in ends:
            tally.add("tp", "all_reduce", num_micro_batches, count * whole)
    if stage.is_last:
        _count_loss(tally, work)


def _count_replicated(tally: Tally, work: Workload, stages: list[Stage]) -> None:
    """Count the sums over tp of gradients of weights that all its ranks hold: one call after all
    micro-batches.
    """
    sizes = work.sizes
    tp = work.degrees.tp
    splits_stream = work.parallel.splits_stream(tp)
    shapes: list[tuple[int, int]] = []
    for has_experts, count in work.layer_kinds(stages):
        params = block_params(sizes, has_experts=has_experts)
        # Experts are divided by ep, which counts no weight twice.
        everywhere = [
            param for param in params if param.is_on_all_ranks(sizes, tp) and not param.is_stacked
        ]
        # If the stream is whole on each rank, norms see the same values on all ranks and have the
        # same gradients.
        summed = [param for param in everywhere if splits_stream or param.cut != "stream"]
        shapes += [param.rank_shape(sizes, tp) for param in summed] * count
    if splits_stream:
        shapes += [*work.last_norm, *work.joint * sizes.num_depths] * stages[-1].is_last
        shapes += work.learned_positions(stages[0])
    shard = FsdpParamGroup(tuple(shapes), num_shards=work.num_shards).shard_numel
    tally.add("tp", "all_reduce", 1, shard * GRADIENT_BYTES)


def _count_loss(tally: Tally, work: Workload) -> None:
    """Count the loss's traffic. Each chunk of tokens all-reduces the largest logit, then the sums
    of exponentials and of target logits.
    """
    calls = work.num_micro_batches * (1 + work.sizes.num_depths)
    for first in range(0, work.tokens, work.parallel.loss_chunk):
        chunk = min(work.parallel.loss_chunk, work.tokens - first)
        tally.add("tp", "all_reduce", calls, 4 * chunk)
        tally.add("tp", "all_reduce", calls, 8 * chunk)


def _count_context(tally: Tally, work: Workload, stage: Stage) -> None:
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


def _count_pipeline(tally: Tally, work: Workload, stage: Stage) -> None:
    """Count the pipeline's traffic. The stream goes to the next stage and its gradient to the
    previous stage, unless both stages are on this rank.
    """
    size = work.compute_itemsize * work.sizes.dim * work.stream_tokens
    for other in (stage.index + 1, stage.index - 1):
        if (
            0 <= other < len(work.stages)
            and work.stage_ranks[other] != work.stage_ranks[stage.index]
        ):
            tally.add("pp", "send", work.num_micro_batches, size)


def _count_tied(tally: Tally, work: Workload, pp_rank: int) -> None:
    """Count the sum of a tied table's gradients over the two ends of a pipeline, which both hold
    the table.
    """
    ends = work.stage_ranks[0], work.stage_ranks[-1]
    if work.sizes.last_stage_embeds and ends[0] != ends[1] and pp_rank in ends:
        shard = work.table.shard_numel
        # With two ranks, the two ends are all ranks of pp.
        tally.add("pp" if work.degrees.pp == 2 else OTHER, "all_reduce", 1, shard * GRADIENT_BYTES)
