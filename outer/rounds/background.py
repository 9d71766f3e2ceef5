"""A round that runs behind the training: one at a time, in a thread of its own."""

import threading
import time

from outer.averaging import Averaging
from outer.island_state import Snapshot
from outer.reports import RoundReport


class Flight:
    """Starts at once. Every rank of the island makes one with its own snapshot of the same round."""

    def __init__(self, averaging: Averaging, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._averaging = averaging
        self._reports: list[RoundReport] = []
        self._error: BaseException | None = None
        name = f"{threading.current_thread().name} round {snapshot.round}"
        # A daemon: a process that is told to stop does not wait for the others of its last round.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a commit: `land` will raise."""
        return self._error is not None

    def land(self) -> tuple[list[RoundReport], float]:
        """Wait for the end: the attempts' reports, the last one committed, and the seconds waited for it.

        Raises what ended it instead.
        """
        started = time.monotonic()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._reports, time.monotonic() - started

    def _run(self) -> None:
        try:
            self._reports = self._averaging.run(self.snapshot)
        except BaseException as error:  # noqa: BLE001 - raised again by `land`, on the thread that can handle it
            self._error = error
