"""Recommend settings that reach a target utilisation, beginning with those that affect training
least.

The order follows from 2501.18512: quantising costs next to nothing, a short delay costs little,
more inner steps per round cost some loss, and dropping elements needs most care. So the codec is
tried first, then delay and fragments, then inner_steps, and last the sparse and 2-bit codecs. With
islands of unequal speed, fewer inner steps on the slow islands are tried before more inner steps on
all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from diloco.planning.predict import Case, Prediction, predict
from outer.config import CODECS, OuterConfig
from outer.cost import HostSpeed
from outer.errors import InputError

DENSE = ("fp32", "bf16", "int8", "int4")
"""Codecs that hardly affect training, in order of decreasing payload size."""
SPARSE = ("stat2", "topk")
FEEDBACK = 0.95
"""The error feedback that is set together with a codec of SPARSE, which trains clearly worse
without it."""
DELAYS = (1, 2, 3, 4, 5)
"""Delays in inner steps. Streaming DiLoCo (2501.18512) finds no loss for delays of up to 5 inner
steps."""
MIX = 0.5
"""The mix of Streaming DiLoCo (2501.18512), for delays of more than one step."""
FRAGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 36)
MAX_INNER_STEPS = 500
WORTH = 0.001
"""Least utilisation that a setting must add to be recommended."""
MAX_BITS_PER_SECOND = 1e15


@dataclass(frozen=True)
class Rung:
    """Settings that differ from the config's, by key in its `outer` section, and the prediction for
    them.
    """

    changes: dict[str, Any]
    case: Case
    prediction: Prediction


Measure = Callable[[OuterConfig], HostSpeed]


def ladder(case: Case, target: float, measure: Measure) -> list[Rung]:
    """Return settings of increasing utilisation.

    The first entry is the config as it is, the last one is the first that reaches `target`, if any
    does.
    """
    rungs = [Rung({}, case, predict(case))]
    # Gossip has neither a delay nor error feedback.
    all_steps = _quantise, _overlap, _even_out, _sync_less, _sparsify
    steps = all_steps if case.outer.gossip is None else (_quantise, _sync_less)
    for make in steps:
        for rung in make(rungs[-1], target, measure):
            if rungs[-1].prediction.utilisation >= target:
                return rungs
            if rung.prediction.utilisation > rungs[-1].prediction.utilisation + WORTH:
                rungs.append(rung)
    return rungs


def needed_bandwidth(case: Case, target: float) -> float | None:
    """Return the bits per second at which the case reaches `target`, or None if no link is fast
    enough.
    """

    def reaches(bits_per_second: float) -> bool:
        link = replace(case.link, bits_per_second=bits_per_second)
        return predict(replace(case, link=link)).utilisation >= target

    low = case.link.bits_per_second
    high = MAX_BITS_PER_SECOND
    if not reaches(high):
        return None
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def apply_changes(rung: Rung, measure: Measure, **changes: Any) -> Rung:
    """Return the rung with further changes.

    Raises InputError if the model has too few layers or the config refuses the changes.
    """
    outer = rung.case.outer.model_copy(
        update={key: value for key, value in changes.items() if "." not in key}
    )
    if "coding.feedback" in changes:
        outer = outer.model_copy(
            update={
                "coding": outer.coding.model_copy(update={"feedback": changes["coding.feedback"]})
            }
        )
    try:
        OuterConfig.model_validate_json(outer.model_dump_json())
    except ValueError as error:
        raise InputError(str(error)) from None
    case = replace(rung.case, outer=outer, speed=measure(outer))
    return Rung(rung.changes | changes, case, predict(case))


def _quantise(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    current = rung.case.outer.codec
    if current not in DENSE:
        return
    for name in DENSE[DENSE.index(current) + 1 :]:
        if name in CODECS:
            yield apply_changes(rung, measure, codec=name)


def _overlap(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    """Yield the smallest delay that reaches the target, with the fewest fragments that do.

    Yields the combination of the highest utilisation if none reaches the target.
    """
    best: Rung | None = None
    outer = rung.case.outer
    if outer.gossip is not None:
        return
    for delay in sorted({outer.delay, *DELAYS}):
        for fragments in sorted({outer.fragments, *FRAGMENTS}):
            if (found := _set_delay(rung, measure, delay, fragments)) is None:
                continue
            if found.prediction.utilisation >= target:
                yield found
                return
            if best is None or found.prediction.utilisation > best.prediction.utilisation:
                best = found
    if best is not None:
        yield best


def _even_out(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    if rung.case.spread > 0 and rung.case.outer.local_steps == "fixed":
        yield apply_changes(rung, measure, local_steps="dynamic")


def _set_delay(rung: Rung, measure: Measure, delay: int, fragments: int) -> Rung | None:
    outer = rung.case.outer
    if outer.wait_for == "quorum" and delay > 0:
        return None
    if delay < outer.delay or fragments < outer.fragments or delay > outer.inner_steps // fragments:
        return None
    mixing = {"mix": MIX} if delay > 1 and not outer.eager else {}
    changes: dict[str, Any] = {"fragments": fragments, "delay": delay} | mixing
    changes = {key: value for key, value in changes.items() if getattr(outer, key) != value}
    try:
        return apply_changes(rung, measure, **changes)
    except InputError:
        return None


def _sync_less(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    """Yield settings with twice the inner steps, four times, and so on, each with as much overlap
    as it allows.
    """
    inner_steps = 2 * rung.case.outer.inner_steps
    while inner_steps <= MAX_INNER_STEPS:
        longer = apply_changes(rung, measure, inner_steps=inner_steps)
        yield max(
            [longer, *_overlap(longer, target, measure)],
            key=lambda each: each.prediction.utilisation,
        )
        inner_steps *= 2


def _sparsify(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    for name in SPARSE:
        if name in CODECS and name != rung.case.outer.codec:
            try:
                sparse = apply_changes(rung, measure, codec=name, **{"coding.feedback": FEEDBACK})
            except (
                InputError
            ):  # For example, merge.max_norm_zscore does not go with a sparse codec.
                continue
            yield sparse
