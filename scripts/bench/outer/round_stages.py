"""Measures each stage's share of a round's CPU time, as thread time inside the stage's functions.

If a stage calls another one, the time counts for the inner stage only. The rest of the process's
time is outside of all stages: sockets, gloo's own threads, the event loop, the round protocol.
"""

import functools
import threading
import time
from collections import Counter
from typing import Any

from outer.reduce.payloads import Payloads
from outer.reduce.reducer import _Attempt
from outer.state.global_state import GlobalState
from outer.state.replica import Replica

STAGES: dict[str, list[tuple[type, str]]] = {
    "snapshot": [(Replica, "pseudo_grads")],
    "norm": [(Replica, "sum_of_squares")],
    "encode": [(Payloads, "check_own"), (Payloads, "encode")],
    "decode": [(Payloads, "decode")],
    "merge": [(_Attempt, "_merge_payloads")],
    "encode mean": [(Payloads, "encode_mean")],
    "decode mean": [(Payloads, "decode_mean")],
    "step, digest": [(GlobalState, "digest_after"), (Replica, "digest_after")],
    "commit": [(Replica, "commit")],
    "write local": [(Replica, "merge")],
}
"""The functions of each stage."""


class StageTimes:
    """CPU seconds of each stage in this process since `reset`.

    Building it wraps the stages' functions.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = threading.local()
        self._lock = threading.Lock()
        for stage, functions in STAGES.items():
            for owner, name in functions:
                setattr(owner, name, self._timed(stage, getattr(owner, name)))

    def reset(self) -> None:
        """Begin to count from zero."""
        self.seconds.clear()

    def _timed(self, stage: str, function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            outside = getattr(self._inner, "seconds", 0.0)
            self._inner.seconds = 0.0
            started = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                took = time.thread_time() - started
                with self._lock:
                    self.seconds[stage] += took - self._inner.seconds
                self._inner.seconds = outside + took

        return run
