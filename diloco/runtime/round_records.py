"""Record an island's rounds: attempts and waits when they happen, committed rounds when they land.
Leader only.
"""

import logging
import math
import time
from collections.abc import Callable

from diloco.records.metrics import LOST, EventRecord, Metrics, RoundRecord
from diloco.runtime.progress import NO_PROGRESS, Progress
from outer.leases.ledger import Ledger
from outer.report import RoundReport, Waiting

log = logging.getLogger(__name__)

WAIT_SECONDS = 15.0
"""Least time between two records of a wait for the same islands."""
FATE = (
    "; that is no majority of the {} islands that began (outer.start_islands), so this round and "
    "later ones are thrown away if the other islands commit more tokens"
)


class RoundRecords:
    """Writes records to metrics.jsonl, from any thread. Does nothing on ranks other than the
    leader.
    """

    def __init__(
        self, metrics: Metrics | None, start_islands: int, beat: Callable[[], None] = lambda: None
    ) -> None:
        """Create the records of a leader, or of another rank with `metrics` None. `beat` is called
        at each sign of progress.
        """
        self._metrics = metrics
        self._start_islands = start_islands
        self._beat = beat
        self.contribution = NO_PROGRESS
        """Progress that the island contributes to the round in progress; empty while it
        observes."""
        self.find_ledger: Callable[[], Ledger] = Ledger
        """Returns the data ledger of the committed state. The outer loop sets it, because it is
        built after this object."""
        self._minority: list[str] = []
        self._lost: dict[str, float] = {}
        """When each lost island was last recorded."""
        self._waited: tuple[frozenset[str], float] | None = None
        """The islands of the last recorded wait, and when it was recorded."""

    def on_abort(self, report: RoundReport) -> None:
        """Record an attempt that was aborted just now. An aborted attempt does not change the
        ledger.
        """
        self._beat()
        self.write(report, self.contribution, 0.0, self.find_ledger())

    def on_wait(self, waiting: Waiting | None) -> None:
        """Record for which islands a round waits: at once if they changed, else every
        WAIT_SECONDS.
        """
        self._beat()
        if waiting is None or self._metrics is None:
            return
        names = frozenset(waiting.islands)
        now = time.monotonic()
        if (
            self._waited is None
            or self._waited[0] != names
            or now - self._waited[1] >= WAIT_SECONDS
        ):
            self._waited = names, now
            self._metrics.write(EventRecord(name="waiting", text=str(waiting)))

    def on_lost(self, island: str, cause: str) -> None:
        """Record that this island lost another island, at most every WAIT_SECONDS for the same
        island.
        """
        now = time.monotonic()
        if self._metrics is not None and now - self._lost.get(island, -math.inf) >= WAIT_SECONDS:
            self._lost[island] = now
            self._metrics.write(EventRecord(name=LOST, text=f"{island}: {cause}"))

    def on_download(self, text: str) -> None:
        """Record how much of another island's state has been downloaded."""
        self._beat()
        if self._metrics is not None:
            self._metrics.write(EventRecord(name="downloading", text=text))

    def write(
        self,
        report: RoundReport,
        progress: Progress,
        waited_seconds: float,
        ledger: Ledger,
        ranks: list[list[float]] | None = None,
    ) -> None:
        """Write the record of an attempt, and warn if few islands committed it, which may be due to
        a broken network.

        `ranks`: times of the island's ranks (watchdog/rank_times.py), given with an attempt that
        has landed.
        """
        if self._metrics is None:
            return
        values = {
            "steps": progress.steps,
            "tokens": progress.tokens,
            "waited_seconds": waited_seconds,
        }
        self._metrics.write(RoundRecord.from_report(report, ledger=ledger, ranks=ranks, **values))
        state = "committed" if report.is_committed else f"aborted ({report.cause})"
        log.info(
            "round %d attempt %d: %s with %s",
            report.round,
            report.attempt,
            state,
            ", ".join(report.participants),
        )
        if report.is_committed:
            self._waited = None
            self._warn_of_few(report, self._metrics)

    def _warn_of_few(self, report: RoundReport, metrics: Metrics) -> None:
        names = report.participants
        expected = self._start_islands
        is_minority = not report.is_own and 2 * len(names) <= expected
        fate = FATE.format(expected) if is_minority else ""
        if len(names) == 1:
            where = "round" if report.is_own else "run"
            log.warning("round %d: this island is ALONE in the %s%s", report.round, where, fate)
            text = f"round {report.round} was committed by this island alone{fate}"
            metrics.write(EventRecord(name="alone", text=text))
        elif is_minority and names != self._minority:
            log.warning("round %d was committed by %s only%s", report.round, ", ".join(names), fate)
            text = f"round {report.round} was committed by {', '.join(names)} only{fate}"
            metrics.write(EventRecord(name="minority", text=text))
        self._minority = names if is_minority else []
