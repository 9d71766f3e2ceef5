"""The threads in which blocking calls wait."""

import threading

from outer.network.event_loop import WaitingThreads


def test_a_thread_that_is_busy_when_the_transport_closes_ends_with_its_work() -> None:
    waiters, has_begun, may_end, threads = WaitingThreads(), threading.Event(), threading.Event(), []

    def work() -> None:
        threads.append(threading.current_thread())
        has_begun.set()
        may_end.wait(60)

    waiters.start(work)
    assert has_begun.wait(60)
    waiters.close()
    may_end.set()
    threads[0].join(60)
    assert not threads[0].is_alive()
