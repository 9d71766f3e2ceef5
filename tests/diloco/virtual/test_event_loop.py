"""Threads, event loops and machines on virtual time."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from diloco.errors import ConfigError
from diloco.virtual.event_loop import VirtualEventLoop
from diloco.virtual.world import Machine, World
from outer.network.event_loop import FreezeDetector

MONTH = 30 * 86400.0
Opener = Callable[[Machine], VirtualEventLoop]


def machine(world: World, name: str = "a") -> Machine:
    return Machine(world, name)


def run(world: World, seconds: float) -> None:
    world.run(lambda: world.now >= seconds)


@pytest.fixture
def open_loop() -> Iterator[Opener]:
    """Opens event loops, which are closed when the test is over."""
    opened: list[VirtualEventLoop] = []

    def open_on(machine: Machine) -> VirtualEventLoop:
        opened.append(VirtualEventLoop(machine))
        return opened[-1]

    yield open_on
    for loop in opened:
        loop.close()


def test_a_wait_takes_virtual_time_only(open_loop: Opener) -> None:
    world, woken = World(2 * MONTH), []
    loop = open_loop(machine(world))

    def live() -> None:
        loop.sleep(MONTH)
        loop.run(asyncio.sleep(100.0))
        woken.append(loop.time())

    loop.spawn(live, "a")
    world.run(lambda: bool(woken))
    assert woken == [pytest.approx(MONTH + 100.0)]


def test_threads_of_several_machines_go_on_in_the_order_of_virtual_time(open_loop: Opener) -> None:
    world, order = World(MONTH), []

    def live(name: str, loop: VirtualEventLoop, pause: float) -> None:
        for _ in range(3):
            loop.sleep(pause)
            order.append((loop.time(), name))

    for name, pause in (("slow", 3.0), ("fast", 2.0)):
        loop = open_loop(machine(world, name))
        loop.spawn(lambda n=name, o=loop, p=pause: live(n, o, p), name)
    world.run(lambda: len(order) == 6)
    # At 6 s the one that has asked first goes first.
    assert order == [
        (2.0, "fast"),
        (3.0, "slow"),
        (4.0, "fast"),
        (6.0, "slow"),
        (6.0, "fast"),
        (9.0, "slow"),
    ]


def test_a_thread_waits_for_another_until_it_has_ended(open_loop: Opener) -> None:
    world, seen = World(MONTH), []
    loop = open_loop(machine(world))

    def live() -> None:
        other = loop.spawn(lambda: loop.sleep(5.0), "other")
        other.join()
        other.join()
        seen.append(loop.time())

    loop.spawn(live, "first")
    world.run(lambda: bool(seen))
    assert seen == [pytest.approx(5.0)]


def test_work_that_does_not_end_in_time_is_given_up(open_loop: Opener) -> None:
    world, seen = World(MONTH), []
    loop = open_loop(machine(world))

    def live() -> None:
        seen.append((loop.try_to(asyncio.sleep(600.0), 2.0), loop.time()))
        with pytest.raises(TimeoutError):
            loop.run(asyncio.sleep(600.0), timeout_seconds=1.0)
        seen.append((True, loop.time()))

    loop.spawn(live, "a")
    world.run(lambda: len(seen) == 2)
    assert seen == [(False, pytest.approx(2.0)), (True, pytest.approx(3.0))]


def test_what_is_due_on_a_frozen_machine_comes_when_it_wakes_and_it_finds_out(
    open_loop: Opener,
) -> None:
    world, seen = World(MONTH), []
    frozen = machine(world)
    loop = open_loop(frozen)

    async def watch() -> None:
        detector = FreezeDetector()
        while True:
            if detector.was_frozen():
                seen.append(loop.time())
            await asyncio.sleep(0.25)

    loop.spawn(lambda: loop.run(watch()), "a")
    run(world, 10.0)
    frozen.frozen_until = 30.0
    run(world, 40.0)
    assert seen == [pytest.approx(30.0)]


def test_nothing_happens_on_a_dead_machine(open_loop: Opener) -> None:
    world, seen = World(MONTH), []
    dead, living = machine(world, "dead"), machine(world, "living")
    for each in (dead, living):
        loop = open_loop(each)
        loop.spawn(lambda o=loop, m=each: (o.sleep(2.0), seen.append(m.name)), each.name)
    world.at(1.0, lambda: setattr(dead, "is_dead", True))
    world.at(5.0, lambda: None)
    run(world, 5.0)
    assert seen == ["living"]


def test_a_run_without_end_is_given_up(open_loop: Opener) -> None:
    world = World(limit_seconds=100.0)
    loop = open_loop(machine(world))
    loop.spawn(lambda: loop.sleep(1000.0), "a")
    with pytest.raises(ConfigError, match="has not ended"):
        world.run(lambda: False)


def test_closing_ends_the_threads_and_tasks_that_still_wait() -> None:
    world, ended = World(MONTH), []
    loop = VirtualEventLoop(machine(world))

    async def wait() -> None:
        try:
            await asyncio.sleep(MONTH)
        finally:
            ended.append("task")

    def live() -> None:
        try:
            loop.run(wait())
        finally:
            ended.append("thread")

    thread = loop.spawn(live, "a")
    world.at(5.0, lambda: None)
    run(world, 5.0)
    loop.close()
    assert sorted(ended) == ["task", "thread"] and thread.is_over


def test_a_wait_that_is_too_short_for_the_clock_ends(open_loop: Opener) -> None:
    world, seen = World(MONTH), []
    loop = open_loop(machine(world))

    async def wait_until(deadline: float) -> None:
        # As the gathering of a round waits for the rest of its grace.
        while (left := deadline - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110 - it is what is tested
            await asyncio.sleep(min(left, 1e-17))
        seen.append(True)

    loop.spawn(lambda: (loop.sleep(1000.0), loop.run(wait_until(loop.time() + 1e-12))), "a")
    world.run(lambda: bool(seen))
