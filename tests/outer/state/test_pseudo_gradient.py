"""The norm of a pseudo-gradient."""

import os
import subprocess
import sys

import pytest
import torch

from outer.merges.geometry import STRETCH_ELEMENTS, sum_of_squares


@pytest.mark.parametrize("num_elements", [0, 1, STRETCH_ELEMENTS - 1, 3 * STRETCH_ELEMENTS + 5])
def test_the_sum_of_squares_is_that_of_double_precision_to_a_millionth(num_elements: int) -> None:
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    assert sum_of_squares(values) == pytest.approx(float(values.double().square().sum()), rel=1e-6)


def test_the_norm_in_a_new_thread_keeps_to_the_number_of_threads_of_the_process() -> None:
    program = """
import os, threading, torch
from outer.merges.geometry import sum_of_squares
torch.set_num_threads(1)
values, tasks = torch.ones(1 << 20), []
def work():
    sum_of_squares(values)
    tasks.append(len(os.listdir("/proc/self/task")))
before = len(os.listdir("/proc/self/task"))
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(tasks[0] - before)
"""
    unset = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    started = subprocess.run(
        [sys.executable, "-c", program],
        env=unset,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert started.stdout.strip() == "1", "the thread itself, and none of OpenMP's"
