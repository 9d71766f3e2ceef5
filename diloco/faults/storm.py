"""An endless sequence of random faults. The same seed gives the same faults in the same order."""

import random
from collections.abc import Iterator

from diloco.faults.spec import BOOTSTRAP, Fault, FaultKind

WEIGHTS: dict[str, int] = {
    "kill": 3,
    "freeze": 3,
    "leave": 2,
    "slow": 1,
    "corrupt": 2,
    BOOTSTRAP: 1,
}
TAKES_DOWN: tuple[FaultKind, ...] = ("kill", "freeze", "leave")
"""Kinds of faults after which an island takes no part for a while."""
SHORT_SECONDS = (1.0, 5.0)
"""Range of a freeze's duration, and of the time until a killed process is started again."""
SLOW_SECONDS = (3.0, 10.0)
SLOWNESS = (2, 4)


def storm(seed: int, rate: float, num_islands: int) -> Iterator[Fault]:
    """Yield faults in order of `second`, on average `rate` for each island and minute.

    The only island of a run is never taken down, because no other could continue: it is only slowed
    down and corrupted.
    """
    draw = random.Random(seed)
    kinds = [kind for kind in WEIGHTS if num_islands > 1 or kind in ("slow", "corrupt")]
    weights = [WEIGHTS[kind] for kind in kinds]
    second = 0.0
    while True:
        second += draw.expovariate(rate * num_islands / 60)
        kind = draw.choices(kinds, weights)[0]
        island = draw.randrange(num_islands)
        yield draw_fault(draw, kind, island, round(second, 2))


def draw_fault(draw: random.Random, kind: str, island: int, second: float) -> Fault:
    """Draw the durations and factors of a fault of this kind."""
    short = round(draw.uniform(*SHORT_SECONDS), 1)
    match kind:
        case "kill":
            return Fault(kind="kill", targets=(island,), second=second, back=short)
        case "leave":
            return Fault(kind="leave", targets=(island,), second=second, back=short)
        case "freeze":
            return Fault(kind="freeze", targets=(island,), second=second, seconds=short)
        case "slow":
            factor = draw.randint(*SLOWNESS)
            seconds = round(draw.uniform(*SLOW_SECONDS), 1)
            return Fault(
                kind="slow", targets=(island,), factor=factor, second=second, seconds=seconds
            )
        case "corrupt":
            return Fault(kind="corrupt", targets=(island,), second=second)
        case _:
            return Fault(kind="kill", targets=(BOOTSTRAP,), second=second, back=short)
