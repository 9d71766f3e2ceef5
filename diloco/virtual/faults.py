"""Faults of a virtual run: the kinds of `--fault` and `--storm` that can happen to modelled
machines.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from diloco.errors import ConfigError
from diloco.faults.spec import Fault, parse_fault
from diloco.virtual.fleet import VirtualFleet
from diloco.virtual.island import Seat, VirtualIsland

KINDS = ("kill", "freeze", "slow", "join")
WATCH_SECONDS = 0.25
"""Seconds between two checks of the islands."""


class VirtualFaults:
    """Watches a fleet and injects faults when they are due."""

    def __init__(
        self,
        fleet: VirtualFleet,
        faults: Sequence[Fault],
        storm: Iterable[Fault],
        seat_of: Callable[[int], Seat],
    ) -> None:
        """Create the injector. `seat_of` returns the seat of any island, including islands that
        join.
        """
        self._fleet = fleet
        self._pending = list(faults)
        self._seat_of = seat_of
        self._storm = filter(
            lambda fault: fault.kind in KINDS and isinstance(fault.targets[0], int), storm
        )
        self._next_of_storm = next(self._storm, None)
        self._is_waited_for: VirtualIsland | None = None
        """An island that had not ended at the last check whether all have ended."""
        self._num_coming = 0
        """Islands that are down and will be started again."""
        self._watch()

    @property
    def is_over(self) -> bool:
        """Return whether the run is over. Once an island has finished, islands that are down are
        not waited for.
        """
        if self._is_waited_for is not None and not self._is_waited_for.is_over:
            # This function is called after every action, so the common case returns early.
            return False
        islands = self._fleet.islands.values()
        self._is_waited_for = next((island for island in islands if not island.is_over), None)
        is_coming = self._num_coming > 0 and not self._fleet.has_finished
        return not is_coming and self._is_waited_for is None

    def _watch(self) -> None:
        fleet = self._fleet
        fleet.watch()
        if not fleet.has_finished:
            for fault in [fault for fault in self._pending if self._is_due(fault)]:
                self._pending.remove(fault)
                self._inject(fault)
            fault = self._next_of_storm
            if fault is not None and self._is_due(fault) and self._may_strike(fault):
                self._inject(fault)
                self._next_of_storm = next(self._storm, None)
        fleet.world.at(fleet.world.now + WATCH_SECONDS, self._watch)

    def _is_due(self, fault: Fault) -> bool:
        fleet = self._fleet
        if fault.second is not None:
            return (
                fleet.first_commit_at is not None
                and fleet.world.now - fleet.first_commit_at >= fault.second
            )
        asked = [
            island
            for index, island in fleet.islands.items()
            if not fault.targets or index in fault.targets
        ]
        if fault.step is not None:
            return any(island.diary.num_steps >= fault.step for island in asked)
        return fault.round is None or any(island.diary.round >= fault.round for island in asked)

    def _may_strike(self, fault: Fault) -> bool:
        """Return whether the target of a storm's fault is up, and at least half of the islands stay
        up after the fault.
        """
        islands = self._fleet.islands
        num_down = sum(island.is_down for island in islands.values())
        return not islands[int(fault.targets[0])].is_down and num_down + 1 <= len(islands) // 2

    def _inject(self, fault: Fault) -> None:
        fleet = self._fleet
        world = self._fleet.world
        if fault.kind == "join":
            fleet.start(self._seat_of(len(fleet.islands)), joins=True)
        for target in map(int, fault.targets):
            if fault.kind == "freeze":
                fleet.freeze(target, fault.seconds or 0.0)
            elif fault.kind == "slow":
                self._slow(target, fault)
            elif not fleet.islands[target].is_over:
                fleet.islands[target].was_killed = True
                fleet.kill(target)
                if fault.back is not None:
                    self._num_coming += 1
                    world.at(world.now + fault.back, partial(self._start_again, target))

    def _slow(self, index: int, fault: Fault) -> None:
        island = self._fleet.islands[index]
        world = self._fleet.world
        island.slowness = fault.factor or 1.0
        if fault.seconds is not None:
            world.at(world.now + fault.seconds, lambda: setattr(island, "slowness", 1.0))

    def _start_again(self, index: int) -> None:
        self._num_coming -= 1
        if not self._fleet.has_finished:
            # The restarted island has no checkpoint. It takes another island's state if a round has
            # been committed.
            self._fleet.start(self._seat_of(index), joins=False)


def parse_faults(texts: Sequence[str]) -> list[Fault]:
    """Parse the faults of a virtual run. Raises ConfigError for a fault that cannot happen in
    it.
    """
    faults = [parse_fault(text) for text in texts]
    for text, fault in zip(texts, faults, strict=True):
        if fault.kind not in KINDS or fault.phase is not None or fault.part is not None:
            raise ConfigError(
                f"--fault {text}: --virtual has the kinds {', '.join(KINDS)}, without phase=, "
                "process=, node=; leave it out, or leave out --virtual"
            )
        if not all(isinstance(target, int) for target in fault.targets):
            raise ConfigError(
                f"--fault {text}: with --virtual there is no bootstrap process; name an island's "
                "index"
            )
    return faults
