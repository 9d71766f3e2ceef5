"""Imports that must not come late, and the device that tests compute on.

Python 3.11 mixes up its parser's state when two threads compile at once ("AST constructor recursion
depth mismatch"), and tests run islands as threads: what torch and hypothesis import at first use is
imported here, by one thread.
"""

import gc
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis.internal.observability
import pytest
import torch
import tqdm

# Islands of tests check in which thread their state is touched; so do processes that they start.
os.environ["DILOCO_CHECK_THREADS"] = "1"
# Else a thread of it is there whenever a progress bar has been: tests fork, which wants one thread
# (tests/harness.py).
tqdm.tqdm.monitor_interval = 0
torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1)])
assert hypothesis.internal.observability
# In a build for CUDA without a GPU, torch's FakeTensorMode invents one; an autograd engine that
# begins after that has a thread for it, and no process forks from there. One that has begun before
# has none.
torch.zeros(1, requires_grad=True).sum().backward()
# No test asserts how long it takes: a busy machine would fail it.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")

_LONG = """
    parity scale integration examples faults hostile foreign test_base_install.py
    test_message_costs.py test_wheel.py inner/checkpoint inner/parallel inner/measure
    inner/optim inner/data/streaming inner/data/test_mixture.py inner/data/test_sources.py
    inner/model/test_init.py inner/test_trainer.py outer/transports outer/network outer/transfer
    outer/rounds outer/membership outer/codecs/test_machines.py outer/agreement/test_liveness.py
    outer/agreement/test_state_machine.py diloco/status diloco/simulate diloco/experiments
    diloco/virtual diloco/watch diloco/watchdog diloco/own_loop diloco/checkpoints
    diloco/doctor/test_swarm_checks.py diloco/records/test_metrics.py
"""
LONG = [Path(__file__).parent / name for name in _LONG.split()]
"""Tests that start many processes, or train on many meshes: most of the time of the default
suite.
"""
assert all(each.exists() for each in LONG), "a folder or file of LONG has moved"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out the folders and files that take most of the time",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is long where --quick asks for it."""
    return True if is_long(collection_path) and config.getoption("--quick") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what is long first: processes that run files side by side then end at about the same
    time.
    """
    items.sort(key=lambda item: not is_long(item.path))


def is_long(path: Path) -> bool:
    """Whether --quick leaves this folder or file out."""
    return any(path.is_relative_to(each) for each in LONG)


def pytest_configure(config: pytest.Config) -> None:
    """Hide the machine's GPUs from the tests and what they start, unless `-m gpu` selects the tests
    that need one.
    """
    if not wants_gpu(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def wants_gpu(markers: str) -> bool:
    """Whether an expression for -m asks for the tests marked gpu."""
    return re.search(r"(?<!not )\bgpu\b", markers) is not None


@pytest.fixture(autouse=True)
def level_of_outer() -> Iterator[None]:
    """Give the logger of outer/ its level back: `diloco doctor`, `status` and `watch` quiet it for
    their process.
    """
    logger = logging.getLogger("outer")
    level = logger.level
    yield
    logger.setLevel(level)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: on a busy machine a scan of it stops all
    islands for seconds.
    """
    gc.collect()
    gc.freeze()
