"""Whether a step fits into a rank's memory, and what to set when it does not. No torch here."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from inner.errors import InputError
from inner.measure.memory import PARTS, estimate
from inner.measure.units import Workload
from inner.parallel.check import check_layout


def advice(work: Workload, optimizer: str, limit_bytes: int, device_type: str = "cuda") -> str:
    """Whether an inner step fits into each rank's memory, and if not what one change would do, the cheapest first."""
    fullest = max(estimate(work, optimizer, device_type), key=lambda memory: memory.peak)
    verdict = f"an inner step needs {_gb(fullest.peak)} of {_gb(limit_bytes)} a rank"
    if fullest.peak <= limit_bytes:
        return f"{verdict}: it fits"
    parts = {name: getattr(fullest, name) for name in PARTS}
    most = ", ".join(f"{name} {_gb(parts[name])}" for name in sorted(PARTS, key=lambda name: -parts[name])[:3])
    needs = {
        text: max(memory.peak for memory in estimate(changed, optimizer, device_type))
        for text, changed in _changes(work)
        if _can_run(changed)
    }
    fitting = [text for text, need in needs.items() if need <= limit_bytes]
    if fitting:
        return f"{verdict} ({most}); set {fitting[0]}, which needs {_gb(needs[fitting[0]])}"
    helping = sorted((need, text) for text, need in needs.items() if need < fullest.peak)[:3]
    if not helping:
        return f"{verdict} ({most}); no single change makes it less: give it more ranks, or make the model smaller"
    tried = ", ".join(f"{text} ({_gb(need)})" for need, text in helping)
    return f"{verdict} ({most}); no single change is enough, the best are {tried}; combine them, or give it more ranks"


def _can_run(work: Workload) -> bool:
    try:
        check_layout(work.sizes, work.degrees, work.parallel, work.seq_len, work.num_micro_batches)
    except InputError:
        return False
    return True


def _changes(work: Workload) -> Iterator[tuple[str, Workload]]:
    """What could be set otherwise for the same model, tokens and ranks; what costs least speed comes first."""
    degrees, parallel = work.degrees, work.parallel

    def computing(**changes: Any) -> Workload:
        return replace(work, parallel=parallel.model_copy(update=changes))

    def on(axis: str, other: str) -> Workload:
        moved = replace(degrees, **{axis: getattr(degrees, axis) * 2, other: getattr(degrees, other) // 2})
        # Ranks that read the same sequences have more of them to read.
        times = degrees.num_data_ranks // moved.num_data_ranks
        return replace(work, degrees=moved, num_micro_batches=work.num_micro_batches * times)

    if degrees.pp == 1 and not work.frees_after_forward:
        yield "island.parallel.zero=3", computing(zero=3)
    if degrees.dp_replicate % 2 == 0:
        yield f"island.mesh.dp_replicate={degrees.dp_replicate // 2}", on("dp_shard", "dp_replicate")
    if parallel.loss_chunk > 1024:
        yield (
            "island.parallel.loss_chunk=1024",
            computing(loss_chunk=1024),
        )
    if work.micro_batch % 2 == 0:
        fewer, more = work.micro_batch // 2, work.num_micro_batches * 2
        yield f"island.micro_batch={fewer}", replace(work, micro_batch=fewer, num_micro_batches=more)
    for recompute in ("attention", "selective", "full"):
        if recompute != parallel.recompute:
            yield f"island.parallel.recompute={recompute}", computing(recompute=recompute)
    if degrees.dp_shard % 2 == 0 and work.sizes.num_heads % (2 * degrees.tp) == 0:
        yield f"island.mesh.tp={2 * degrees.tp}", on("tp", "dp_shard")


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
