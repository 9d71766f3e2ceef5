"""Virtual time: what happens in it, in order, and the machines on which it happens."""

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
"""What an event loop takes to look at what is due. A wait that is shorter than the clock can tell would never end."""
MOST_SECONDS = 4e6
"""Beyond it a number of seconds is no longer exact to the nanosecond, by which asyncio tells what is due."""


MAX_RESULTS = 1 << 15
"""Results that are kept, those used last."""


class World:
    """The clock of a simulation. Nothing takes time but what is asked to happen later; it all runs on one thread."""

    def __init__(self, limit_seconds: float) -> None:
        """`limit_seconds`: virtual time after which the simulation is given up."""
        self.now = 0.0
        """Seconds since the beginning."""
        self.acting: Machine | None = None
        """The machine on which something happens now."""
        self.sampled = 1
        """The processor time of one in so many actions on machines is measured, as reading the clock takes long."""
        self.num_actions = 0
        self._limit_seconds = min(limit_seconds, MOST_SECONDS)
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, when: float, action: Action) -> None:
        """Call `action` at this time, after what has been asked for the same time before."""
        heappush(self._due, (max(when, self.now), next(self._numbers), action))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let time pass until it is over. Raises ConfigError when it does not end."""
        while not is_over():
            if not self._due or self._due[0][0] > self._limit_seconds:
                raise ConfigError(
                    f"--virtual: the run has not ended after {self.now:.0f} virtual seconds; use faster links or "
                    "fewer faults"
                )
            when, _, action = heappop(self._due)
            self.now, self.acting = max(self.now, when), None
            action()


class Machine:
    """What one island runs on: it can die or freeze, and it counts the processor time that the island's code takes."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.is_dead = False
        self.frozen_until = 0.0
        self.cpu_seconds = 0.0
        """Real processor time for which the island's code has run."""

    def at(self, when: float, action: Action) -> None:
        """Call `action` at this time on this machine: later if the machine is frozen then, and never if it is dead."""
        self.world.at(when, partial(self._act, action))

    def _act(self, action: Action) -> None:
        if self.is_dead:
            return
        if self.world.now < self.frozen_until:
            self.at(self.frozen_until, action)
            return
        world = self.world
        world.acting, world.num_actions = self, world.num_actions + 1
        if world.num_actions % world.sampled:
            action()
            return
        # The clock of this process takes longer the more threads it has. That of this thread leaves out the machine's
        # own threads, which count for themselves.
        started = time.thread_time()
        action()
        self.cpu_seconds += world.sampled * (time.thread_time() - started)


class SharedWork:
    """Work that all islands would do alike is done once, and its processor time counts for each: a `Share`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._results: OrderedDict[Hashable, tuple[Any, float, Machine | None]] = OrderedDict()
        """By name of the work: its result, the processor seconds that it took, and the machine that did it."""

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
