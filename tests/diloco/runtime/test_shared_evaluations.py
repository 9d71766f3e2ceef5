"""One evaluation for all islands of a process."""

import threading

import pytest

from diloco.records.metrics import EvalRecord
from diloco.runtime.evaluation import MAX_KEPT, SharedEvaluations

LIMIT = 30.0
RECORD = EvalRecord(round=3, tokens=100, loss=2.5, bits_per_byte=3.6)


def test_islands_that_ask_meanwhile_get_what_the_first_one_finds() -> None:
    shared, begun, may_end, calls, losses = (
        SharedEvaluations(),
        threading.Event(),
        threading.Event(),
        [],
        [],
    )

    def evaluate() -> EvalRecord:
        calls.append(threading.get_ident())
        begun.set()
        assert may_end.wait(LIMIT)
        return RECORD

    threads = [
        threading.Thread(
            target=lambda: losses.append(shared.find("key", evaluate).loss), daemon=True
        )
        for _ in range(5)
    ]
    threads[0].start()
    assert begun.wait(LIMIT)
    for thread in threads[1:]:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join(LIMIT)
    assert losses == [2.5] * 5
    assert len(calls) == 1


def test_other_params_are_evaluated_anew() -> None:
    shared, calls = SharedEvaluations(), []

    def evaluate() -> EvalRecord:
        calls.append(0)
        return RECORD

    for key in range(MAX_KEPT + 1):
        shared.find(key, evaluate)
    assert len(calls) == MAX_KEPT + 1
    shared.find(0, evaluate)
    assert len(calls) == MAX_KEPT + 2, "the oldest is not kept"


def test_every_island_hears_of_a_failure() -> None:
    shared = SharedEvaluations()

    def fail() -> EvalRecord:
        raise ValueError("no memory")

    for _ in range(2):
        with pytest.raises(ValueError, match="no memory"):
            shared.find("key", fail)
