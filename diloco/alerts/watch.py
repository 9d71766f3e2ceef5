"""Watches an island's own records while it trains, and sends alerts. Only the leader of an island
has a watch.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.alerts.delivery import deliver
from diloco.alerts.rules import Alert, Rules
from diloco.config.island import AlertsConfig
from diloco.overview.account import RunAccount
from diloco.records.best_effort import best_effort
from diloco.records.metrics import Metrics, Record
from inner.threads import start_thread

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""How often the rules are applied."""
CLOSE_SECONDS = 5.0
"""Longest wait at the end for an alert that is being sent."""


class AlertWatch:
    """A Sink of records that sends alerts from a thread of its own."""

    def __init__(
        self,
        config: AlertsConfig,
        run: str,
        island: str,
        folder: Path,
        every: float = CHECK_SECONDS,
    ) -> None:
        self._config = config
        self._run = run
        self._island = island
        self._every = every
        self._lock = threading.Lock()
        account = RunAccount()
        self._own = account.island(island)
        self._rules = Rules(config, account, folder, time.time())
        self._is_over = threading.Event()
        self._done = start_thread(self._watch, "alerts", CLOSE_SECONDS)

    def write(self, record: Record) -> None:
        """Add the next record to the account."""
        with self._lock:
            self._own.write(record)

    def close(self) -> None:
        """Apply the rules to the last records, and wait a moment for alerts that are being sent."""
        self._is_over.set()
        self._done.wait(CLOSE_SECONDS)

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(self._every)
            try:
                with self._lock:
                    found = self._rules.find(time.time())
            except OSError as error:
                log.warning("alerts: the disk's space is not known: %s", error)
                continue
            for rule, text in found:
                alert = Alert(
                    rule=rule, run=self._run, island=self._island, text=text, time=time.time()
                )
                log.warning("alert: %s", text)
                deliver(alert, self._config)


@contextmanager
def watch_for_alerts(
    config: AlertsConfig, run: str, island: str, folder: Path, metrics: Metrics
) -> Iterator[None]:
    """Send alerts about the records that are written in the block, if the config names a way to
    send them.
    """
    if config.is_on:
        with best_effort("no alerts are sent"):
            metrics.add_sink(AlertWatch(config, run, island, folder))
    yield
