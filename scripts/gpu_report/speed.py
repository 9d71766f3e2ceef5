"""Measures tokens per second and model FLOPs utilisation (MFU) of our steps and a plain Llama's.

Our steps are measured eager and compiled. MFU is given relative to the data sheet's operations per
second (`of_sheet`), as most published figures are, and to the measured peak of matrix products
(`of_measured`), which is lower. Of attention it counts all scores (`full`), as most published
figures do, or the half that causal attention needs (`causal`).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import torch

from diloco.planning.mesh.gpus import find_sheet
from inner.flops import flops_per_token
from inner.measure.peak_flops import peak_flops
from inner.model.sizes import PRESETS
from scripts.gpu_report.place import Place, Row, guarded
from scripts.gpu_report.plain import build_plain
from scripts.gpu_report.training import TINY, TrainingCase, one_rank, wait_for_device

WARM_STEPS = 3
SECONDS = 2.5
FEWEST = 4
MOST = 25
"""Seconds for which steps are measured, and the fewest and the most steps."""
DEPTHS = (2, 4)
"""Numbers of layers of two models, whose step times give the time of one layer."""
TARGET = 0.97
"""Least ratio of our tokens per second to the plain Llama's, both compiled."""

Measure = Callable[[Place, TrainingCase, str], Row]


def measure_150m(place: Place) -> Iterator[Row]:
    sizes = replace(PRESETS["150m"], vocab_size=32000)
    yield from _measure(place, TrainingCase(sizes, 4096, 4, num_micro_batches=2), measure)


def measure_1b(place: Place) -> Iterator[Row]:
    # The plain Llama has no tied head.
    sizes = replace(PRESETS["1b"], tie_embeddings=False)
    yield from _measure(place, TrainingCase(sizes, 4096, 2, num_micro_batches=2), measure)


def measure_8b_layers(place: Place) -> Iterator[Row]:
    """Measure the time of a layer and of the rest, and add them up to a whole 8b.

    A whole 8b does not fit into the memory with its optimizer.
    """
    case = TrainingCase(PRESETS["8b"], 8192, 1, num_micro_batches=2)
    yield from _measure(place, case, measure_layers)


def _measure(place: Place, case: TrainingCase, how: Measure) -> Iterator[Row]:
    if place.is_tiny:
        case = replace(case, sizes=replace(TINY, num_layers=6), seq_len=32, micro_batch=2)
    eager, compiled = (with_compile(case, value=value) for value in (False, True))
    kinds = [("ours", eager), ("plain", eager)]
    if place.with_compile:
        kinds = [("ours", eager), ("ours", compiled), ("plain", compiled)]
    rows: list[Row] = []
    with one_rank(place):
        yield from guarded("peak", lambda: describe_peaks(place, case))
        for who, chosen in kinds:
            name = f"{who} {'compiled' if chosen.parallel.compile else 'eager'}"
            rows += guarded(name, lambda who=who, chosen=chosen: how(place, chosen, who))
            yield rows[-1]
    yield from guarded("ours / plain", lambda: compare(place, *rows[-2:]))


def with_compile(case: TrainingCase, *, value: bool) -> TrainingCase:
    return replace(case, parallel=case.parallel.model_copy(update={"compile": value}))


def describe_peaks(place: Place, case: TrainingCase) -> Row:
    return {
        f"{name}_TFLOPs_per_s": peak / 1e12 for name, peak in find_peaks(place, case.dtype).items()
    }


def find_peaks(place: Place, dtype: str) -> dict[str, float]:
    """Return the peak operations per second, by the data sheet (of bf16) and as measured.

    An unknown peak is left out.
    """
    sheet = None if place.is_tiny else find_sheet(torch.cuda.get_device_name(place.first))
    measured = peak_flops(place.first, dtype)
    found = {"sheet": sheet.flops if sheet else None, "measured": measured}
    return {name: peak for name, peak in found.items() if peak is not None}


def compare(place: Place, ours: Row, plain: Row) -> Row:
    """Compare the trainer with a loop that trains on one GPU only.

    On a CPU the models are too small for a verdict.
    """
    if "tokens_per_s" not in ours or "tokens_per_s" not in plain:
        return {"problem": "one of the two was not measured", "ok": False}
    ratio = ours["tokens_per_s"] / plain["tokens_per_s"]
    is_judged = place.with_compile and not place.is_tiny
    return {"ratio": ratio, "target": TARGET} | ({"ok": ratio >= TARGET} if is_judged else {})


def measure(place: Place, case: TrainingCase, who: str) -> Row:
    return _figures(place, case, step_seconds(place, case, who))


def measure_layers(place: Place, case: TrainingCase, who: str) -> Row:
    few, many = (
        step_seconds(place, replace(case, sizes=replace(case.sizes, num_layers=n)), who)
        for n in DEPTHS
    )
    layer = (many - few) / (DEPTHS[1] - DEPTHS[0])
    rest = few - DEPTHS[0] * layer
    seconds = rest + case.sizes.num_layers * layer
    return {"layer_ms": 1e3 * layer, "rest_ms": 1e3 * rest, **_figures(place, case, seconds)}


def step_seconds(place: Place, case: TrainingCase, who: str) -> float:
    """Return the median seconds of an inner step."""
    step = build_ours(case, place.first) if who == "ours" else build_plain(case, place.first)
    for _ in range(WARM_STEPS):
        step()
    wait_for_device(place)
    took: list[float] = []
    while len(took) < FEWEST or (
        sum(took) < (0.2 if place.is_tiny else SECONDS) and len(took) < MOST
    ):
        started = time.perf_counter()
        step()
        wait_for_device(place)
        took.append(time.perf_counter() - started)
    return median(took)


def build_ours(case: TrainingCase, device: str) -> Callable[[], object]:
    """Build an inner step of our trainer on the case's first text."""
    trainer = case.build(device, weights_matter=False)
    windows = case.windows(0)
    return lambda: trainer.step(windows)


def _figures(place: Place, case: TrainingCase, seconds: float) -> Row:
    flops = flops_per_token(case.sizes, case.seq_len)
    per_second = case.tokens / seconds
    counted = {"full": flops.total, "causal": flops.matmul + flops.attention / 2}
    mfu = {
        f"mfu_{attention}_of_{of}": count * per_second / peak
        for of, peak in find_peaks(place, case.dtype).items()
        for attention, count in counted.items()
    }
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_s": per_second,
        **mfu,
        "layers": case.sizes.num_layers,
    }
