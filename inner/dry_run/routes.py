"""Numbers of rows that the ranks of ep would send each other, for a dry run, whose routers choose
nothing.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from inner.measure.workload import Workload
from inner.model.experts import mixtures
from inner.model.transformer import Transformer
from inner.parallel.expert import RowExchange


def set_routes(model_parts: list[Transformer], work: Workload) -> None:
    """Let the mixtures of these stages exchange as many rows as the plan of `work` says: equally
    many for each expert, or all that can be for the experts of this rank.
    """
    for mixture in mixtures(model_parts):
        if isinstance(mixture.exchange, RowExchange):
            rank = mixture.exchange.group.rank()
            find = _all_to_one if work.all_rows_arrive else _even
            mixture.exchange = replace(mixture.exchange, to_lists=_fixed(find(work, rank)))


def _fixed(sizes: list[list[int]]) -> Callable[[Tensor], list[list[int]]]:
    def to_lists(_: Tensor) -> list[list[int]]:
        return sizes

    return to_lists


def _even(work: Workload, rank: int) -> list[list[int]]:
    """Return the numbers of rows that a rank sends to, and receives from, each rank of ep."""
    ep = work.degrees.ep
    sent = [work.num_rows // ep + (place < work.num_rows % ep) for place in range(ep)]
    return [sent, [sent[rank]] * ep]


def _all_to_one(work: Workload, rank: int) -> list[list[int]]:
    """Return the same if the tokens of all ranks choose the experts of this rank, as far as it has
    different ones. The rest goes to the next rank.
    """
    ep = work.degrees.ep
    each = work.num_arriving_rows // ep
    sent = [0] * ep
    sent[rank] = each
    sent[(rank + 1) % ep] += work.num_rows - each
    return [sent, [each] * ep]
