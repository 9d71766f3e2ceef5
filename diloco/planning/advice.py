"""What to set so that an island computes for a wanted share of its time: what costs the training least comes first.

Quantising costs next to nothing, a short delay little, more inner steps a round some loss, and dropping elements most
care (2501.18512): so codec, then delay and fragments, then inner_steps, then sparse or 2-bit codecs. Where islands are
of unequal speed, fewer steps of the slow ones come before more of all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from diloco.planning.predict import Case, HostSpeed, Prediction, predict
from outer.config import OuterConfig
from outer.errors import InputError

DENSE = ("fp32", "bf16", "int8", "int4")
"""Codecs that need no care, by size."""
SPARSE = ("stat2", "topk")
FEEDBACK = 0.95
"""For those that do: without what they leave out they train clearly worse."""
DELAYS = (1, 2, 3, 4, 5)
"""2501.18512 finds no loss up to 5."""
MIX = 0.5
"""That paper's, for delays of more than one step."""
FRAGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 36)
MAX_INNER_STEPS = 500
WORTH = 0.001
"""Of the time: a setting that wins less is not recommended."""
MAX_BITS_PER_SECOND = 1e15


@dataclass(frozen=True)
class Rung:
    """A setting, and what it gives; `changes`: against the config, by key below `outer`."""

    changes: dict[str, Any]
    case: Case
    prediction: Prediction


Measure = Callable[[OuterConfig], HostSpeed]


def ladder(case: Case, target: float, measure: Measure) -> list[Rung]:
    """Settings, each a step further than the one before, the last the first that reaches `target`, if any does."""
    rungs = [Rung({}, case, predict(case))]
    # With gossip nothing is hidden, and nothing kept of what coding loses.
    steps = (_quantised, _delayed, _evened, _rarer, _sparse) if case.outer.gossip is None else (_quantised, _rarer)
    for make in steps:
        for rung in make(rungs[-1], target, measure):
            if rungs[-1].prediction.utilisation >= target:
                return rungs
            if rung.prediction.utilisation > rungs[-1].prediction.utilisation + WORTH:
                rungs.append(rung)
    return rungs


def needed_bandwidth(case: Case, target: float) -> float | None:
    """Bits a second at which the case reaches `target`; None: no link is fast enough."""

    def reaches(bits_per_second: float) -> bool:
        link = replace(case.link, bits_per_second=bits_per_second)
        return predict(replace(case, link=link)).utilisation >= target

    low, high = case.link.bits_per_second, MAX_BITS_PER_SECOND
    if not reaches(high):
        return None
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def codecs() -> tuple[str, ...]:
    """Names that a config may have."""
    return get_args(OuterConfig.model_fields["codec"].annotation)


def changed(rung: Rung, measure: Measure, **changes: Any) -> Rung:
    """The rung with these changes, too. Raises InputError when the model cannot be cut so."""
    outer = rung.case.outer.model_copy(update={key: value for key, value in changes.items() if "." not in key})
    if "coding.feedback" in changes:
        outer = outer.model_copy(
            update={"coding": outer.coding.model_copy(update={"feedback": changes["coding.feedback"]})}
        )
    case = replace(rung.case, outer=outer, speed=measure(outer))
    return Rung(rung.changes | changes, case, predict(case))


def _quantised(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    current = rung.case.outer.codec
    if current not in DENSE:
        return
    for name in DENSE[DENSE.index(current) + 1 :]:
        if name in codecs():
            yield changed(rung, measure, codec=name)


def _delayed(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    """The least delay, then the fewest fragments, that reach the target; else the best."""
    best: Rung | None = None
    outer = rung.case.outer
    if outer.gossip is not None:
        return
    for delay in sorted({outer.delay, *DELAYS}):
        for fragments in sorted({outer.fragments, *FRAGMENTS}):
            if (found := _overlapped(rung, measure, delay, fragments)) is None:
                continue
            if found.prediction.utilisation >= target:
                yield found
                return
            if best is None or found.prediction.utilisation > best.prediction.utilisation:
                best = found
    if best is not None:
        yield best


def _evened(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    if rung.case.spread > 0 and rung.case.outer.local_steps == "fixed":
        yield changed(rung, measure, local_steps="dynamic")


def _overlapped(rung: Rung, measure: Measure, delay: int, fragments: int) -> Rung | None:
    outer = rung.case.outer
    if outer.wait_for == "quorum" and delay > 0:
        return None
    if delay < outer.delay or fragments < outer.fragments or delay > outer.inner_steps // fragments:
        return None
    mixing = {"mix": MIX} if delay > 1 and not outer.eager else {}
    changes: dict[str, Any] = {"fragments": fragments, "delay": delay} | mixing
    changes = {key: value for key, value in changes.items() if getattr(outer, key) != value}
    try:
        return changed(rung, measure, **changes)
    except InputError:
        return None


def _rarer(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    """Twice the inner steps, and again, each with as much overlap as it then has room for."""
    inner_steps = 2 * rung.case.outer.inner_steps
    while inner_steps <= MAX_INNER_STEPS:
        wider = changed(rung, measure, inner_steps=inner_steps)
        yield max([wider, *_delayed(wider, target, measure)], key=lambda each: each.prediction.utilisation)
        inner_steps *= 2


def _sparse(rung: Rung, target: float, measure: Measure) -> Iterator[Rung]:
    for name in SPARSE:
        if name in codecs() and name != rung.case.outer.codec:
            yield changed(rung, measure, codec=name, **{"coding.feedback": FEEDBACK})
