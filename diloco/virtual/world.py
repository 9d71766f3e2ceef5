"""Virtual time: an ordered queue of actions, and the machines on which they happen."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from diloco.errors import ConfigError

Action = Callable[[], object]
TICK_SECONDS = 1e-9
"""Time that an event loop takes to check what is due. A wait below the clock's resolution would
never end."""
MOST_SECONDS = 4e6
"""Longest virtual time. Beyond it a number of seconds is not exact to the nanosecond, which asyncio
needs."""


MAX_RESULTS = 1 << 15
"""Number of results that are kept; the least recently used are dropped."""


class World:
    """The clock of a simulation. Time passes only between planned actions, and all actions run on
    one thread.
    """

    def __init__(self, limit_seconds: float) -> None:
        """Create the clock. `limit_seconds`: virtual time after which the simulation is given
        up.
        """
        self.now = 0.0
        """Virtual seconds since the beginning."""
        self.acting: Machine | None = None
        """The machine on which the present action happens."""
        self.sampled = 1
        """Processor time is measured in one of this number of actions on machines, because reading
        the clock takes long."""
        self.num_actions = 0
        self._limit_seconds = min(limit_seconds, MOST_SECONDS)
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, when: float, action: Action) -> None:
        """Call `action` at this time, after earlier requests for the same time."""
        heappush(self._due, (max(when, self.now), next(self._numbers), action))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let time pass until `is_over` returns True. Raises ConfigError if the run does not
        end.
        """
        while not is_over():
            if not self._due or self._due[0][0] > self._limit_seconds:
                raise ConfigError(
                    f"--virtual: the run has not ended after {self.now:.0f} virtual seconds; use "
                    "faster links or fewer faults"
                )
            when, _, action = heappop(self._due)
            self.now = max(self.now, when)
            self.acting = None
            action()


class Machine:
    """The machine of one island. It can die or freeze, and it counts the processor time of the
    island's code.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.frozen_until = 0.0
        self.cpu_seconds = 0.0
        """Real processor seconds for which the island's code has run."""

    def at(self, when: float, action: Action) -> None:
        """Call `action` at this time on this machine: later if the machine is frozen then, and
        never if it is dead.
        """
        self.world.at(when, partial(self._act, action))

    def _act(self, action: Action) -> None:
        if self.is_dead:
            return
        if self.world.now < self.frozen_until:
            self.at(self.frozen_until, action)
            return
        world = self.world
        world.acting = self
        world.num_actions = world.num_actions + 1
        if world.num_actions % world.sampled:
            action()
            return
        # The clock of the whole process gets slower with the number of threads. The clock of this
        # thread leaves out the machine's other threads, which measure their own time.
        started = time.thread_time()
        action()
        self.cpu_seconds += world.sampled * (time.thread_time() - started)


class SharedWork:
    """Work that is equal on all islands is done once, and its processor time is charged to each
    island: a `Share`.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._results: OrderedDict[Hashable, tuple[Any, float, Machine | None]] = OrderedDict()
        """Result, processor seconds, and the machine that did the work, by the name of the work."""

    def __call__(self, name: Hashable, work: Callable[[], Any]) -> Any:
        machine = self._world.acting
        if name in self._results:
            result, seconds, first = self._results[name]
            self._results.move_to_end(name)
            if machine is not None and machine is not first:
                machine.cpu_seconds += seconds
            return result
        started = time.thread_time()
        result = work()
        self._results[name] = result, time.thread_time() - started, machine
        if len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)
        return result
