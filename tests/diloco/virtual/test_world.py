"""Machines of a world share work that is the same for all of them, and each is charged for it."""

import time

import pytest

from diloco.virtual.world import Machine, SharedWork, World
from outer.network.messages import do_shared, sharing

BUSY_SECONDS = 0.05


def be_busy() -> str:
    """Use the processor for some time."""
    started = time.thread_time()
    while time.thread_time() < started + BUSY_SECONDS:
        pass
    return "done"


def test_work_is_done_once_and_counts_for_each_machine() -> None:
    world, done = World(10.0), []
    machines = [Machine(world, name) for name in "abc"]
    with sharing(SharedWork(world)):
        for number, machine in enumerate(machines):
            machine.at(number, lambda: done.append(do_shared("work", be_busy)))
        before = time.thread_time()
        world.run(lambda: len(done) == len(machines))
        spent = time.thread_time() - before
    assert done == ["done"] * 3
    assert BUSY_SECONDS <= spent < 2 * BUSY_SECONDS
    assert min(machine.cpu_seconds for machine in machines) >= BUSY_SECONDS


def test_without_sharing_each_does_its_own_work() -> None:
    done: list[str] = []
    for _ in range(2):
        do_shared("work", lambda: done.append("done"))
    assert done == ["done"] * 2


def test_a_failure_is_not_shared() -> None:
    def fail() -> None:
        raise ValueError("broken")

    with sharing(SharedWork(World(1.0))):
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                do_shared("work", fail)
        assert do_shared("work", lambda: 1) == 1
