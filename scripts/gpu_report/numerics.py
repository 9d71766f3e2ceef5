"""Compares training on the device with training on the CPU in fp32.

Losses and gradient norms are compared, from equal weights and text.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from inner.config import ParallelConfig
from inner.model.sizes import PRESETS
from inner.trainer import StepResult
from scripts.gpu_report.place import Place, Row, guarded
from scripts.gpu_report.training import TINY, TrainingCase, one_rank

STEPS = 10
DTYPES = "bfloat16", "float32"
FIRST_LOSS = {"float32": 1e-4, "bfloat16": 5e-3}
"""Largest relative difference of the first loss, by dtype.

Later losses may differ TIMES_LATER times as much.
"""
TIMES_LATER = 20.0


def compare_with_cpu(place: Place) -> Iterator[Row]:
    with one_rank(place):
        for dtype, masks, recompute, compiled in list_cases(place):
            parallel = ParallelConfig.model_validate({"recompute": recompute, "compile": compiled})
            case = replace(build_case(place, masks=masks), dtype=dtype, parallel=parallel)
            words = [
                dtype,
                f"recompute {recompute}",
                *["documents"] * masks,
                *["compiled"] * compiled,
            ]
            yield from guarded(", ".join(words), lambda case=case: compare(place, case))


def list_cases(place: Place) -> Iterator[tuple[str, bool, str, bool]]:
    """Yield dtype, whether documents are masked, recomputation, and whether to compile.

    The most informative cases come first. Eager cases take a second each and compiled ones up to
    ten, so only some combinations are compiled.
    """
    yield from product(DTYPES, (False, True), ("none", "selective", "full"), (False,))
    if place.with_compile:
        for dtype in DTYPES:
            yield from ((dtype, False, "none", True), (dtype, True, "full", True))


def build_case(place: Place, *, masks: bool) -> TrainingCase:
    sizes, seq_len = (TINY, 32) if place.is_tiny else (PRESETS["1m"], 256)
    return TrainingCase(sizes, seq_len, 2, "float32", num_micro_batches=2, masks_documents=masks)


def compare(place: Place, case: TrainingCase) -> Row:
    expected = train_on_cpu(build_case(place, masks=case.masks_documents))
    found = train(case, place.first)
    first, last = (difference(found[i].loss, expected[i].loss) for i in (0, -1))
    norm = difference(found[0].grad_norm, expected[0].grad_norm)
    limit = FIRST_LOSS[case.dtype]
    is_close = first <= limit and max(norm, last) <= TIMES_LATER * limit
    return {"first_loss": first, "first_norm": norm, f"loss_{STEPS}": last, "ok": is_close}


@cache
def train_on_cpu(case: TrainingCase) -> tuple[StepResult, ...]:
    return train(case, "cpu")


def train(case: TrainingCase, device: str) -> tuple[StepResult, ...]:
    """Make a few steps, and return their results.

    Every rank of the case's mesh must call it; each trains on its share of the text.
    """
    trainer = case.build(device)
    first = trainer.data_rank
    num_shares = trainer.num_data_ranks
    return tuple(trainer.step(case.windows(step)[first::num_shares]) for step in range(STEPS))


def difference(found: float | None, expected: float | None) -> float:
    """Return the relative difference; infinity if a step was skipped."""
    return (
        float("inf") if found is None or expected is None else abs(found - expected) / abs(expected)
    )
