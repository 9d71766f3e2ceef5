"""Expert parallelism: each rank of `ep` holds some of a layer's experts, and tokens travel to them
and back.

The ranks of dp_shard x cp x tp are seen a second time, as edp x ep. Along edp, FSDP shards the
experts of a rank of ep.

    dispatch   each rank sends every row to the rank that holds its expert
    combine    each rank sends the results back the same way

Rows arrive sorted by expert, then by the rank that sent them, then by position.

Shape suffixes: R rows of this rank's tokens sorted by expert, A rows that have arrived, D dim, X
all experts, L experts of this rank, P ranks of ep.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from inner.model.expert_rows import permute
from inner.model.experts import mixtures
from inner.model.kept import keep
from inner.parallel.tensor_stream import TensorStream

_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class RowRoute:
    """How the rows of one micro-batch travel."""

    sent: list[int]
    """Number of rows for each rank of ep."""
    received: list[int]
    """Number of rows from each rank of ep."""
    order_A: Tensor
    """For each row by expert, its place among the rows by rank."""
    inverse_A: Tensor
    """For each row by rank, its place among the rows by expert."""
    ends_L: Tensor
    """Number of rows up to the end of each of this rank's experts', int32."""


@dataclass(frozen=True)
class RowExchange:
    """The exchange of rows among the ranks of ep. All of them must make each call together."""

    group: ProcessGroup
    to_lists: Callable[[Tensor], list[list[int]]] = Tensor.tolist
    """Returns the numbers of rows that are sent and received (2, P), which are on the host. A dry
    run, which has no numbers, gives others.
    """

    @property
    def num_ranks(self) -> int:
        return self.group.size()

    def plan(self, counts_X: Tensor) -> RowRoute:
        """Return how rows travel, given this rank's number of rows for each expert, int64 (X)."""
        theirs_PL = keep(lambda: self._exchange_counts(counts_X))
        sent_P = counts_X.view(self.num_ranks, -1).sum(dim=1)
        # The host needs the numbers of rows, so it waits for the device here, but not in a
        # repeated forward.
        sizes_2P = keep(lambda: torch.stack((sent_P, theirs_PL.sum(dim=1))).cpu())
        (sent, received) = self.to_lists(sizes_2P)
        order_A = _order_by_expert(theirs_PL, sum(received))
        inverse_A = torch.empty_like(order_A)
        inverse_A[order_A] = torch.arange(len(order_A), device=order_A.device)
        ends_L = theirs_PL.sum(dim=0).cumsum(0).int()
        return RowRoute(sent, received, order_A, inverse_A, ends_L)

    def dispatch(self, rows_RD: Tensor, route: RowRoute) -> Tensor:
        """Return the rows for this rank's experts (A, D), sorted by expert."""
        by_rank_AD = _AllToAll.apply(rows_RD, route.sent, route.received, self.group.group_name)
        assert isinstance(by_rank_AD, Tensor)
        return permute(by_rank_AD, route.order_A, route.inverse_A)

    def combine(self, results_AD: Tensor, route: RowRoute) -> Tensor:
        """Return the results of this rank's rows (R, D), in the order in which they were
        dispatched.
        """
        by_rank_AD = permute(results_AD, route.inverse_A, route.order_A)
        results_RD = _AllToAll.apply(by_rank_AD, route.received, route.sent, self.group.group_name)
        assert isinstance(results_RD, Tensor)
        return results_RD

    def _exchange_counts(self, counts_X: Tensor) -> Tensor:
        """Return for each rank of ep how many rows it has for each of this rank's experts."""
        # Selective recomputation keeps the results of functional collectives, by their order. This
        # one has another form, because a repeated forward leaves it out.
        theirs_X = torch.empty_like(counts_X)
        dist.all_to_all_single(theirs_X, counts_X, group=self.group)
        return theirs_X.view(self.num_ranks, -1)


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the experts over the 1-D `mesh`, and let tokens travel to them. Every rank of the mesh
    must call it, before FSDP.
    """
    for mixture in mixtures([model]):
        mixture.exchange = RowExchange(mesh.get_group())
        for module in mixture.experts.children():
            weight = module.get_parameter("weight")
            # No values are sent, because parameters are on the meta device.
            sharded = distribute_tensor(weight.data, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter("weight", nn.Parameter(sharded))


@dataclass(frozen=True)
class PositionShare:
    """This rank's block of the positions, of ranks of tp that all have the stream.

    With sequence parallelism the stream is divided already, and only the padding of all positions
    is known. Otherwise each rank routes its block, and the results are put together.
    """

    stream: TensorStream
    rank: int

    def take(self, x_BSD: Tensor, is_input_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's positions of the stream, and which of them are tokens."""
        mine_BS = is_input_BS.chunk(self.stream.num_ranks, dim=1)[self.rank]
        if self.stream.is_split:
            return x_BSD, mine_BS
        # The gradients of the blocks are added up to that of the whole stream.
        return self.stream.gather(x_BSD).chunk(self.stream.num_ranks, dim=1)[self.rank], mine_BS

    def give(self, y_BSD: Tensor) -> Tensor:
        """Return the stream from the results at this rank's positions."""
        if self.stream.is_split:
            return y_BSD
        positions = y_BSD.shape[1]
        after = (self.stream.num_ranks - 1 - self.rank) * positions
        return self.stream.scatter(F.pad(y_BSD, (0, 0, self.rank * positions, after)))


def _order_by_expert(counts_PL: Tensor, num_rows: int) -> Tensor:
    """Return the places of rows that lie by rank and then by expert, in the order by expert and
    then by rank.

    `num_rows`: the sum of the counts. If it were not given, the host would wait for it.
    """
    (P, L) = counts_PL.shape
    experts_PL = torch.arange(L, device=counts_PL.device).expand(P, L)
    expert_A = experts_PL.flatten().repeat_interleave(counts_PL.flatten(), output_size=num_rows)
    return expert_A.argsort(stable=True)


def _send(rows: Tensor, sent: list[int], received: list[int], group_name: str) -> Tensor:
    return _functional.wait_tensor(
        _functional.all_to_all_single(rows.contiguous(), received, sent, group_name)
    )


class _AllToAll(torch.autograd.Function):
    """Sends rows. The backward sends their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group_name: str
    ) -> Tensor:
        ctx.back = (received, sent, group_name)
        return _send(rows, sent, received, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _send(grads[0], *ctx.back), None, None, None
