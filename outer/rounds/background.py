"""A round that runs in a background thread while local params are trained, one at a time."""

import threading

from outer.report import RoundReport
from outer.rounds.averager import Averager
from outer.state.pseudo_gradient import Contribution, Snapshot


class BackgroundRound:
    """Starts at once. Every rank of the island makes one, with its own snapshot for the same round."""

    def __init__(self, averager: Averager, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._averager = averager
        self._reports: list[RoundReport] = []
        self._error: BaseException | None = None
        name = f"{threading.current_thread().name} round {snapshot.round}"
        # A daemon: a process that is told to stop does not wait for the other islands of its last round.
        self._thread = averager.event_loop.spawn(self._run, name)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a commit, so that `land` will raise."""
        return self._error is not None

    def land(self) -> tuple[list[RoundReport], float]:
        """Wait for the end: reports of all attempts, the committed one last, and the seconds spent waiting.

        Raises the error that ended the round, if one did.
        """
        now = self._averager.event_loop.time
        started = now()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._reports, now() - started

    def _run(self) -> None:
        try:
            self._reports = self._averager.run(Contribution(self.snapshot))
        except BaseException as error:  # noqa: BLE001 - raised again by `land`, on the thread that can handle it
            self._error = error
