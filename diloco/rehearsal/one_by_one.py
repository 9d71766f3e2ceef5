"""Injects faults one after another, each when the run has recovered from the one before."""

import time
from collections.abc import Iterator, Sequence

from diloco.faults.spec import Fault
from diloco.runtime.operator_requests import STOP, make_request
from diloco.simulate.fleet import Fleet
from diloco.simulate.injector import FaultInjector

CALM_SECONDS = 4.0
"""Time between the end of a fault and the next one, at least. All islands must have committed in
it.
"""
GIVE_UP_SECONDS = 180.0
"""After so long without calm the rehearsal ends; the table then shows what did not come back."""


class OneByOne(FaultInjector):
    """Injects each fault when all islands have committed since the one before it has ended, and
    then ends the run.
    """

    def __init__(
        self, fleet: Fleet, faults: Sequence[Fault], storm: Iterator[Fault] | None = None
    ) -> None:
        assert storm is None, "a rehearsal has its own faults"
        super().__init__(fleet, (), iter(faults))
        self._calm_since: float | None = None
        self._rounds_at_calm: dict[int, int] = {}
        self._last_fault_at = time.monotonic()
        self._has_asked = False

    def poll(self) -> None:
        """Do what FaultInjector does, and end the run after the last fault, or if calm does not
        come.
        """
        self._note_calm()
        super().poll()
        is_late = time.monotonic() - self._last_fault_at > GIVE_UP_SECONDS
        is_over = self._next_of_storm is None and self._is_calm()
        if (is_over or is_late) and not self._has_asked:
            self._has_asked = True
            make_request(self._fleet.run_dir, STOP)

    def _inject(self, fault: Fault) -> None:
        super()._inject(fault)
        self._calm_since = None
        self._last_fault_at = time.monotonic()

    def _may_strike(self, fault: Fault) -> bool:
        return not self._has_asked and self._is_calm()

    def _note_calm(self) -> None:
        """Remember since when nothing is under way and no island is down."""
        is_disturbed = bool(
            self._restarts or self._scheduled_ends or any(map(self.is_down, self._fleet.islands))
        )
        if is_disturbed:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = time.monotonic()
            self._rounds_at_calm = {
                index: progress.round for index, progress in self._progress.items()
            }

    def _is_calm(self) -> bool:
        """Return whether all islands have committed in CALM_SECONDS or more without a fault."""
        if self._calm_since is None or time.monotonic() - self._calm_since < CALM_SECONDS:
            return False
        before = self._rounds_at_calm
        return all(
            progress.round > before.get(index, 0) for index, progress in self._progress.items()
        )
