"""When a rank collects garbage.

All ranks of an island collect garbage after the same inner step. A full collection looks at every object, several
100,000 after the start, and stops the rank for 0.2 s on a CPU core. Python begins one when it likes, on each rank at
another moment, and in every collective all ranks wait for the slowest. Importing this does not import torch.
"""

import gc

COLLECT_STEPS = 50
SELDOM = 1000
"""Full collections that Python begins itself, in collections of middle-aged objects (usually 10): after millions of new
objects without an inner step, as when an island waits for its state for hours."""


def schedule_garbage() -> None:
    """Spare the collector all objects that exist now, and leave full collections to `collect_garbage`.

    Python begins one itself only after SELDOM younger ones. Young objects are still collected as Python decides: that
    takes microseconds and frees most cycles.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, SELDOM)


def collect_garbage(inner_step: int) -> None:
    """Collect all garbage if that is due after this inner step. Every rank of the island calls it after each step."""
    if inner_step % COLLECT_STEPS == 0:
        gc.collect()
