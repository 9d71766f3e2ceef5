"""Records of an island as its training writes them, for tests of what is made of them."""

from dataclasses import replace
from typing import Any

from diloco.records.metrics import RoundRecord, StepRecord


def a_step(step: int = 1, loss: float | None = 2.5, grad_norm: float | None = 0.7) -> StepRecord:
    return StepRecord(
        step=step,
        tokens=step * 512,
        loss=loss,
        lr=3e-4,
        grad_norm=grad_norm,
        seconds=0.1,
        tokens_per_second=5120.0,
        skipped=loss is None,
    )


def a_round(number: int = 0, committed: bool = True, **changes: Any) -> RoundRecord:
    """The record of an attempt, with other values where `changes` has them."""
    record = RoundRecord(
        round=number,
        attempt=0,
        participants=("island-0", "island-1"),
        committed=committed,
        digest="ab12",
        bytes_sent=1000,
        bytes_received=900,
        reduce_seconds=0.5,
        wait_seconds=0.1,
        pseudo_gradient_norm=1.5,
        cause=None if committed else "island 'island-1' is lost: connection reset",
    )
    return replace(record, **changes)
