"""What a rank's process sets for itself: how many files it may open, and when it collects garbage.

All ranks of an island collect garbage after the same inner step. A full collection looks at every object, several
100,000 after the start, and stops the rank for 0.2 s on a CPU core. Python begins one when it likes, on each rank at
another moment, and in every collective all ranks wait for the slowest. Importing this does not import torch.
"""

import gc
import resource
from contextlib import suppress

MAX_FILES = 1 << 16
"""More would only make programs slow that look at every descriptor that could be open."""
NUM_GROUPS = 4
"""gloo groups of all ranks: torch's world, the rank group, the one in background, and that of checkpoints."""
OTHER_FILES = 512
COLLECT_STEPS = 50
SELDOM = 1000
"""Full collections that Python begins itself, in collections of middle-aged objects (usually 10): after millions of new
objects without an inner step, as when an island waits for its state for hours."""


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it, at most MAX_FILES. Returns the limit."""
    limit, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = find_allowed_files()
    if limit != resource.RLIM_INFINITY and wanted > limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, allowed))
            return wanted
    return limit


def find_allowed_files() -> int:
    """The limit that a process of this user may give itself, at most MAX_FILES."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_FILES if allowed == resource.RLIM_INFINITY else min(allowed, MAX_FILES)


def count_needed_files(num_ranks: int) -> int:
    """Number of files that a rank may have open at once: a socket for each other rank in each group, and the rest."""
    return NUM_GROUPS * (num_ranks - 1) + OTHER_FILES


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
