"""Imports that must not come late.

Python 3.11 mixes up its parser's state when two threads compile at once ("AST constructor recursion depth mismatch"),
and tests run islands as threads: what torch and hypothesis import at first use is imported here, by one thread.
"""

import gc

import hypothesis.internal.observability
import torch
import tqdm

# Else a thread of it is there whenever a progress bar has been: tests fork, which wants one thread (tests/harness.py).
tqdm.tqdm.monitor_interval = 0
torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1)])
assert hypothesis.internal.observability
# No test asserts how long it takes: a busy machine would fail it.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: on a busy machine a scan of it stops all islands for seconds."""
    gc.collect()
    gc.freeze()
