"""The threads in which blocking calls wait."""

import sys
import threading

from outer.network.event_loop import WaitingThreads
from outer.network.retry import retry_blocking


def test_a_thread_that_is_busy_when_the_transport_closes_ends_with_its_work() -> None:
    waiters, has_begun, may_end, threads = (
        WaitingThreads(),
        threading.Event(),
        threading.Event(),
        [],
    )

    def work() -> None:
        threads.append(threading.get_ident())
        has_begun.set()
        may_end.wait(60)

    waiters.start(work)
    assert has_begun.wait(60)
    waiters.close()
    may_end.set()
    assert retry_blocking(
        lambda: threads[0] not in sys._current_frames(), seconds=60, pause_seconds=0.01
    )
