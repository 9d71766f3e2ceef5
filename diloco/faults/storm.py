"""Faults without end, drawn with a seed: the same seed gives the same faults in the same order."""

import random
from collections.abc import Iterator

from diloco.fault_spec import BOOTSTRAP, Fault, Kind

WEIGHTS: dict[str, int] = {"kill": 3, "freeze": 3, "leave": 2, "slow": 1, "corrupt": 2, BOOTSTRAP: 1}
TAKES_DOWN: tuple[Kind, ...] = ("kill", "freeze", "leave")
"""The islands that these strike take no part for a while."""
SHORT_SECONDS = (1.0, 5.0)
"""A freeze, and how long a killed island or bootstrap process stays away."""
SLOW_SECONDS = (3.0, 10.0)
SLOWNESS = (2, 4)


def storm(seed: int, rate: float, num_islands: int) -> Iterator[Fault]:
    """Faults at `second`s that grow by 60 / (rate x islands) on average: `rate` an island and minute.

    A run of one island has no other that could go on: it is slowed and its payloads are corrupted, no more.
    """
    draw = random.Random(seed)
    kinds = [kind for kind in WEIGHTS if num_islands > 1 or kind in ("slow", "corrupt")]
    weights = [WEIGHTS[kind] for kind in kinds]
    second = 0.0
    while True:
        second += draw.expovariate(rate * num_islands / 60)
        kind = draw.choices(kinds, weights)[0]
        island = draw.randrange(num_islands)
        yield drawn(draw, kind, island, round(second, 2))


def drawn(draw: random.Random, kind: str, island: int, second: float) -> Fault:
    """A fault of this kind, its numbers drawn."""
    short = round(draw.uniform(*SHORT_SECONDS), 1)
    match kind:
        case "kill":
            return Fault(kind="kill", who=(island,), second=second, back=short)
        case "leave":
            return Fault(kind="leave", who=(island,), second=second, back=short)
        case "freeze":
            return Fault(kind="freeze", who=(island,), second=second, seconds=short)
        case "slow":
            factor, seconds = draw.randint(*SLOWNESS), round(draw.uniform(*SLOW_SECONDS), 1)
            return Fault(kind="slow", who=(island,), factor=factor, second=second, seconds=seconds)
        case "corrupt":
            return Fault(kind="corrupt", who=(island,), second=second)
        case _:
            return Fault(kind="kill", who=(BOOTSTRAP,), second=second, back=short)
