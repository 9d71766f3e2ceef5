"""Check whether a step fits into a rank's memory, and find a setting to change if it does not. No
torch here.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from inner.errors import InputError
from inner.measure.memory import MEMORY_PARTS, estimate_memory
from inner.measure.workload import Workload
from inner.optim.state_bytes import StateBytes
from inner.parallel.layout_check import check_layout


def advice(
    work: Workload, optimizer: str | StateBytes, limit_bytes: int, device_type: str = "cuda"
) -> str:
    """Return a text that says whether an inner step fits into each rank's memory, or else the
    cheapest single change that helps.
    """
    fullest = max(estimate_memory(work, optimizer, device_type), key=lambda memory: memory.peak)
    verdict = f"an inner step needs {_gb(fullest.peak)} of {_gb(limit_bytes)} per rank"
    if fullest.peak <= limit_bytes:
        return f"{verdict}: it fits"
    parts = {name: getattr(fullest, name) for name in MEMORY_PARTS}
    most = ", ".join(
        f"{name} {_gb(parts[name])}"
        for name in sorted(MEMORY_PARTS, key=lambda name: -parts[name])[:3]
    )
    needs = {
        text: max(memory.peak for memory in estimate_memory(changed, optimizer, device_type))
        for text, changed in _changes(work)
        if _can_run(changed)
    }
    fitting = [text for text, need in needs.items() if need <= limit_bytes]
    if fitting:
        return f"{verdict} ({most}); set {fitting[0]}, which needs {_gb(needs[fitting[0]])}"
    helping = sorted((need, text) for text, need in needs.items() if need < fullest.peak)[:3]
    if not helping:
        return f"{verdict} ({most}); no single change reduces it; use more ranks or a smaller model"
    tried = ", ".join(f"{text} ({_gb(need)})" for need, text in helping)
    return (
        f"{verdict} ({most}); no single change is enough, the best are {tried}; combine them "
        "or use more ranks"
    )


def _can_run(work: Workload) -> bool:
    try:
        check_layout(work.sizes, work.degrees, work.parallel, work.seq_len, work.num_micro_batches)
    except InputError:
        return False
    return True


def _changes(work: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield changed settings for the same model, tokens and ranks. Changes that cost the least
    speed come first.
    """
    degrees = work.degrees
    parallel = work.parallel

    def with_parallel(**changes: Any) -> Workload:
        return replace(work, parallel=parallel.model_copy(update=changes))

    def move_ranks(axis: str, other: str) -> Workload:
        moved = replace(
            degrees, **{axis: getattr(degrees, axis) * 2, other: getattr(degrees, other) // 2}
        )
        # With fewer data ranks, each of them has more sequences to read.
        times = degrees.num_data_ranks // moved.num_data_ranks
        return replace(work, degrees=moved, num_micro_batches=work.num_micro_batches * times)

    if parallel.keeps_weights and work.num_shards > 1:
        yield "island.parallel.zero=2", with_parallel(zero=2)
    elif parallel.accumulate == "whole" and work.num_shards > 1 and work.num_micro_batches > 1:
        yield "island.parallel.accumulate=sharded", with_parallel(accumulate="sharded")
    if work.has_whole_weights and degrees.cp > 1:
        stage = 3 if degrees.pp == 1 else 2
        yield f"island.parallel.zero={stage}", with_parallel(zero=stage)
    elif degrees.pp == 1 and not work.frees_after_forward:
        yield "island.parallel.zero=3", with_parallel(zero=3)
    if degrees.dp_replicate % 2 == 0:
        yield (
            f"island.mesh.dp_replicate={degrees.dp_replicate // 2}",
            move_ranks("dp_shard", "dp_replicate"),
        )
    if parallel.loss_chunk > 1024:
        yield "island.parallel.loss_chunk=1024", with_parallel(loss_chunk=1024)
    if work.micro_batch % 2 == 0:
        fewer = work.micro_batch // 2
        more = work.num_micro_batches * 2
        yield (
            f"island.micro_batch={fewer}",
            replace(work, micro_batch=fewer, num_micro_batches=more),
        )
    for recompute in ("attention", "selective", "full"):
        if recompute != parallel.recompute:
            yield f"island.parallel.recompute={recompute}", with_parallel(recompute=recompute)
    if degrees.dp_shard % 2 == 0 and work.sizes.num_heads % (2 * degrees.tp) == 0:
        yield f"island.mesh.tp={2 * degrees.tp}", move_ranks("tp", "dp_shard")


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
