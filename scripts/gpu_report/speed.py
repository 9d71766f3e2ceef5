"""Tokens per second and model FLOPs utilisation (MFU) of inner steps, eager and compiled.

MFU is given twice, relative to the measured peak of matrix products: `mfu` counts attention as if each position saw the
whole sequence, as most published figures do, and `mfu_causal` half of it, which is what causal attention needs.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

from inner.config import ParallelConfig
from inner.flops import flops_per_token
from inner.measure.peak_flops import peak_flops
from inner.model.sizes import PRESETS, ModelSizes
from scripts.gpu_report.place import Place, Row, guarded
from scripts.gpu_report.training import TINY, TrainingCase, one_rank, wait_for_device

WARM_STEPS = 3
SECONDS, FEWEST, MOST = 5.0, 3, 30
"""Steps are measured for so long, but not fewer or more than these."""
DEPTHS = (2, 4)
"""Numbers of layers between which the time of one layer is found."""


def measure_150m(place: Place) -> Iterator[Row]:
    yield from _measure(place, TrainingCase(PRESETS["150m"], 2048, 8), measure)


def measure_1b(place: Place) -> Iterator[Row]:
    case = TrainingCase(PRESETS["1b"], 4096, 2, parallel=ParallelConfig(recompute="selective"))
    yield from _measure(place, case, measure)


def measure_8b_layers(place: Place) -> Iterator[Row]:
    """A whole 8b does not fit with its optimizer: time of a layer and of the rest, added up to the whole model."""
    case = TrainingCase(PRESETS["8b"], 8192, 1, parallel=ParallelConfig(recompute="selective"))
    yield from _measure(place, case, measure_layers)


def _measure(place: Place, case: TrainingCase, how: Callable[[Place, TrainingCase], Row]) -> Iterator[Row]:
    if place.is_tiny:
        case = replace(case, sizes=replace(TINY, num_layers=6), seq_len=32, micro_batch=2)
    with one_rank(place):
        for compiled in (False, True) if place.with_compile else (False,):
            parallel = case.parallel.model_copy(update={"compile": compiled})
            chosen = replace(case, parallel=parallel)
            yield from guarded("compiled" if compiled else "eager", lambda case=chosen: how(place, case))


def measure(place: Place, case: TrainingCase) -> Row:
    return _figures(place, case, case.sizes, step_seconds(place, case))


def measure_layers(place: Place, case: TrainingCase) -> Row:
    few, many = (step_seconds(place, replace(case, sizes=replace(case.sizes, num_layers=n))) for n in DEPTHS)
    layer = (many - few) / (DEPTHS[1] - DEPTHS[0])
    rest = few - DEPTHS[0] * layer
    seconds = rest + case.sizes.num_layers * layer
    return {"layer_ms": 1e3 * layer, "rest_ms": 1e3 * rest, **_figures(place, case, case.sizes, seconds)}


def step_seconds(place: Place, case: TrainingCase) -> float:
    """The median time of an inner step."""
    trainer, windows = case.build(place.first), case.windows(0)
    for _ in range(WARM_STEPS):
        trainer.step(windows)
    wait_for_device(place)
    took: list[float] = []
    while len(took) < FEWEST or (sum(took) < (0.2 if place.is_tiny else SECONDS) and len(took) < MOST):
        started = time.perf_counter()
        trainer.step(windows)
        wait_for_device(place)
        took.append(time.perf_counter() - started)
    return median(took)


def _figures(place: Place, case: TrainingCase, sizes: ModelSizes, seconds: float) -> Row:
    flops, peak = flops_per_token(sizes, case.seq_len, case.parallel.recompute), peak_flops(place.first, case.dtype)
    per_second = case.tokens / seconds
    causal = flops.matmul + flops.attention / 2
    shares = {} if peak is None else {"mfu": flops.total / peak, "mfu_causal": causal / peak}
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_s": per_second,
        **{name: share * per_second for name, share in shares.items()},
        "layers": sizes.num_layers,
        "seq_len": case.seq_len,
        "recompute": case.parallel.recompute,
    }
