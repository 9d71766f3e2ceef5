"""Decide when a rank collects garbage.

All ranks of an island collect garbage after the same inner step. A full collection checks every
object, several 100,000 after the start, and stops the rank for 0.2 s on a CPU core. Python would
start full collections at a different moment on each rank, and in every collective all ranks wait
for the slowest. Importing this does not import torch.
"""

import gc

COLLECT_STEPS = 50
SELDOM = 1000
"""Threshold for full collections by Python itself, in collections of the middle generation (usually
10). It is reached after millions of new objects without an inner step, for example while an island
waits for its state for hours."""


def schedule_garbage() -> None:
    """Exclude all present objects from garbage collection, and leave full collections to
    `collect_garbage`.

    Python still starts a full collection after SELDOM collections of younger objects. It collects
    young objects as before, which takes microseconds and frees most cycles.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, SELDOM)


def collect_garbage(inner_step: int) -> None:
    """Collect all garbage if it is due after this inner step. Every rank of the island must call it
    after each step.
    """
    if inner_step % COLLECT_STEPS == 0:
        gc.collect()
