"""Held-out losses that islands of one process share.

After a commit all islands hold the same global params, so their losses are equal bit for bit, and the first island that
comes to an evaluation makes it for all. A process with one island evaluates as if there were nothing to share.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace

from diloco.records.metrics import EvalRecord

MAX_KEPT = 16
"""Evaluations that are kept. Islands are within a round of each other; with gossip each has params of its own."""


class SharedEvaluations:
    """Finds each evaluation once, whichever thread asks for it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, Future[EvalRecord]] = OrderedDict()

    def find(self, key: Hashable, evaluate: Callable[[], EvalRecord]) -> EvalRecord:
        """The record of `evaluate`, or of the island that was first to ask for an equal key.

        `key` must say everything that the loss depends on. Waits as long as that island's `evaluate`, which must not
        wait for other islands; what it raises is raised for all.
        """
        with self._lock:
            found = self._found.get(key)
            own = Future[EvalRecord]() if found is None else None
            if own is not None:
                self._found[key] = own
                if len(self._found) > MAX_KEPT:
                    self._found.popitem(last=False)
        if found is not None:
            return replace(found.result(), time=time.time())
        assert own is not None, "there is one of the two"
        try:
            own.set_result(evaluate())
        except BaseException as error:
            own.set_exception(error)
            raise
        return own.result()
