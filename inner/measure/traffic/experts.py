"""Predict the traffic of a mixture of experts: rows of tokens, counts and loads. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass

from inner.config.experts import ROUTER_SUMS
from inner.measure.traffic.rows import Tally, axis_of_all_ranks
from inner.measure.workload import FP32, Workload
from inner.model.stage import Stage

COUNT_BYTES = 8
"""Bytes of a number of rows that ranks of ep tell each other, and of a number that all ranks
sum.
"""


@dataclass(frozen=True)
class RowsMoved:
    """Rows of a rank that travel over ep in the forwards of a step, in all of its layers."""

    sent: int
    """Rows of this rank's tokens whose experts are on other ranks."""
    received: int
    """Rows of other ranks' tokens whose experts are on this rank."""


RowsOf = Callable[[Workload, Stage], RowsMoved]
"""Returns the rows of a stage's layers."""


def planned_rows(work: Workload, stage: Stage) -> RowsMoved:
    """Return the rows of one stage's layers if each expert gets equally many, or if the rows of all
    ranks of ep arrive here: see `Workload.all_rows_arrive`.
    """
    num_calls = work.num_micro_batches * _num_layers(work, stage)
    own = -(-work.num_arriving_rows // work.degrees.ep)
    return RowsMoved(num_calls * (work.num_rows - own), num_calls * own * (work.degrees.ep - 1))


def count_rows(tally: Tally, work: Workload, stage: Stage, rows_of: RowsOf) -> None:
    """Count the rows of a stage, and the exchange of their numbers.

    A forward sends rows to their experts and results back, and so does a backward with gradients. A
    block that is recomputed whole repeats its forward, but not the exchange of numbers.
    """
    num_calls = work.num_micro_batches * _num_layers(work, stage)
    if num_calls == 0 or work.sizes.experts is None:
        return
    moved = rows_of(work, stage)
    passes = 3 if work.parallel.recompute == "full" else 2
    row = work.compute_itemsize * work.sizes.dim
    tally.add("ep", "all_to_all", num_calls, COUNT_BYTES * work.sizes.experts.number)
    tally.add_sent(
        "ep", "all_to_all", 2 * passes * num_calls, passes * row * (moved.sent + moved.received)
    )


def count_loads(tally: Tally, work: Workload, stage: Stage) -> None:
    """Count the sums of the experts' loads over the ranks that share a sequence, of which the
    sequence loss needs one per layer and micro-batch. A repeated forward does not sum again.
    """
    if work.sizes.experts is None or not work.balance.sequence_loss:
        return
    loads = FP32 * work.micro_batch * work.sizes.experts.number
    for axis in ("cp", "tp"):
        tally.add(axis, "all_reduce", work.num_micro_batches * _num_layers(work, stage), loads)


def count_routing(tally: Tally, work: Workload) -> None:
    """Count the sum over all ranks of what the routers did in a step: counts of each layer's
    experts, and other numbers (inner/optim/expert_balance.py).
    """
    if work.sizes.experts is None:
        return
    size = COUNT_BYTES * len(work.sizes.expert_layers) * (work.sizes.experts.number + ROUTER_SUMS)
    tally.add(axis_of_all_ranks(work.degrees), "all_reduce", 1, size)


def _num_layers(work: Workload, stage: Stage) -> int:
    """Return the number of the stage's layers that have experts."""
    return dict(work.layer_kinds([stage])).get(True, 0)
