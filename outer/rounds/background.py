"""A round that runs in a background thread while local params are trained. Only one runs at a
time.
"""

from outer.report import RoundReport
from outer.rounds.averager import Averager
from outer.state.earlier import EarlierState
from outer.state.pseudo_gradient import Contribution, Snapshot
from outer.threads import Worker


class BackgroundRound:
    """A round in the background, which starts at once. Every rank of the island makes one, with
    its own snapshot for the same round.
    """

    def __init__(
        self,
        averager: Averager,
        snapshot: Snapshot,
        worker: Worker,
        earlier: EarlierState | None = None,
    ) -> None:
        """Start the round. `earlier`: the state to which this island would go back instead,
        together with others.
        """
        self.snapshot = snapshot
        self.earlier = earlier
        self._averager = averager
        self._reports: list[RoundReport] = []
        self._error: BaseException | None = None
        self._work = worker.start(self._run)

    @property
    def has_failed(self) -> bool:
        """Whether the round has ended without a commit, so that `land` will raise."""
        return self._error is not None

    def land(self) -> tuple[list[RoundReport], float]:
        """Wait for the end. Return the reports of all attempts, the committed one last, and the
        seconds spent waiting.

        Raises the error that ended the round, if there was one.
        """
        now = self._averager.event_loop.time
        started = now()
        self._work.join()
        if self._error is not None:
            raise self._error
        return self._reports, now() - started

    def _run(self) -> None:
        try:
            self._reports = self._averager.run(Contribution(self.snapshot, self.earlier))
        except BaseException as error:  # noqa: BLE001 - raised again by `land`, on the thread that can handle it
            self._error = error
