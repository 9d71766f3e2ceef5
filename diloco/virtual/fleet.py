"""The islands of a virtual run: start, kill, freeze, slow down and restart them."""

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.virtual.island import LandedRound, Seat, VirtualIsland
from diloco.virtual.network import Counts, VirtualNetwork
from diloco.virtual.world import Machine, World
from outer.transports.loopback import Hub

COLLECT_ROUNDS = 20
"""Number of rounds between garbage collections, which run between the work of islands."""
START_SECONDS = 1.0
"""Islands start at random times within these seconds, so that they do not always send at the same
moment."""


@dataclass(frozen=True)
class Totals:
    """Totals of a run at the time when the first island committed a round."""

    num_rounds: int
    """Number of rounds committed by then."""
    at: float
    """Virtual time in seconds."""
    counts: Counts
    cpu_seconds: dict[str, float]
    """Real processor seconds by island, over all of its processes."""
    link_seconds: float
    """Seconds for which the busiest direction of any link has been in use."""

    def since(self, earlier: "Totals") -> "Totals":
        """Return the totals counted since `earlier`."""
        cpu = {
            name: seconds - earlier.cpu_seconds.get(name, 0.0)
            for name, seconds in self.cpu_seconds.items()
        }
        seconds = self.link_seconds - earlier.link_seconds
        return Totals(self.num_rounds, self.at, self.counts.since(earlier.counts), cpu, seconds)


class VirtualFleet:
    """The processes of all islands. `islands` has the latest process of each island, by index."""

    def __init__(self, world: World, hub: Hub, network: VirtualNetwork, seed: int) -> None:
        self.world = world
        self._hub = hub
        self._network = network
        self._chance = random.Random(seed)
        self.islands: dict[int, VirtualIsland] = {}
        self.processes: list[VirtualIsland] = []
        """All processes that were ever started."""
        self.totals: dict[int, Totals] = {}
        """Totals by number of committed rounds."""
        self.first_commit_at: float | None = None

    def start(self, seat: Seat, *, joins: bool) -> None:
        """Start a process of the island. With `joins` it takes another island's state."""
        incarnation = sum(each.seat.index == seat.index for each in self.processes)
        self._hub.heal(seat.name)
        after = self._chance.uniform(0.0, START_SECONDS)
        machine = Machine(self.world, seat.name)
        island = VirtualIsland(
            seat, machine, incarnation=incarnation, joins=joins, start_after=after
        )
        self.islands[seat.index] = island
        self.processes.append(island)

    def kill(self, index: int) -> None:
        """End the island's process at once; its connections break."""
        island = self.islands[index]
        island.machine.is_dead = True
        island.diary.ended_at = island.diary.ended_at or self.world.now
        self._hub.lose(island.seat.name)

    def freeze(self, index: int, seconds: float) -> None:
        """Freeze everything on the island's machine for `seconds`; its connections stay open."""
        self.islands[index].machine.frozen_until = self.world.now + seconds

    def watch(self) -> None:
        """Record news: processes that have ended, and rounds that were committed for the first
        time.
        """
        for index, island in self.islands.items():
            if island.is_over and not island.machine.is_dead:
                self.kill(index)
        done = self.num_rounds
        if done and self.first_commit_at is None:
            self.first_commit_at = self.world.now
        if done not in self.totals:
            self.totals[done] = self._count()
            if done % COLLECT_ROUNDS == 0:
                gc.collect()

    def close(self) -> None:
        """Free the threads and event loops of all processes. Must be called after the
        simulation.
        """
        for island in self.processes:
            island.close()

    @property
    def num_rounds(self) -> int:
        """Number of rounds committed by any island."""
        return max(
            (
                island.diary.rounds[-1].number + 1
                for island in self.processes
                if island.diary.rounds
            ),
            default=0,
        )

    @property
    def has_finished(self) -> bool:
        """Whether an island has reached the end of the run."""
        return any(
            island.diary.ended_at and not island.diary.error and not island.was_killed
            for island in self.processes
        )

    @property
    def landed(self) -> Sequence[tuple[VirtualIsland, LandedRound]]:
        """All rounds that islands have made, each with the process that made it."""
        return [(island, landed) for island in self.processes for landed in island.diary.rounds]

    def _count(self) -> Totals:
        cpu: dict[str, float] = {}
        for island in self.processes:
            cpu[island.seat.name] = cpu.get(island.seat.name, 0.0) + island.machine.cpu_seconds
        return Totals(
            self.num_rounds,
            self.world.now,
            self._network.counts.copy(),
            cpu,
            self._network.busiest_seconds,
        )
