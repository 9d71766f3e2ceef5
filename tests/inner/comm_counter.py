"""Counts what an island's ranks say to each other: calls and bytes of every collective, by mesh axis."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inner.measure.traffic import OTHER, Row, sent_bytes
from inner.mesh import IslandMesh

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
SCALARS_BYTES = 64
"""Collectives of no more than this are bookkeeping: losses, norms, counts."""

OPS = {
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_ "
    "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ "
    "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
    "all_to_all": "alltoall_ alltoall_base_ all_to_all_single shard_dim_alltoall",
    "broadcast": "broadcast_ broadcast",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "send": "send isend",
    # Nothing leaves this rank, or nothing worth counting; the other end of a receive counts it.
    "": "recv_ recv_any_source_ irecv barrier monitored_barrier_",
}
"""torch's names of each operation, in all namespaces."""
_OP_OF = {name: op for op, names in OPS.items() for name in names.split()}

INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensor", "tensors")
GROUPS = ("process_group", "group_name")
"""Arguments of torch's operations: what this rank gives, and to whom."""


class Ledger(TorchDispatchMode):
    """Inside `with Ledger(groups) as ledger`, everything that this rank sends is counted in `ledger.rows`.

    `groups` has the process group of each axis, see island_groups. A group that two axes share is counted as `a+b`; one
    that is not given counts for the axis of the same ranks, or else as `other`. One of a single rank is left out:
    nothing leaves the rank. The ledger sees what this thread calls and what autograd calls for it in other threads (a
    CUDA device's backward), but not what another Python thread starts. Every operation of the step passes through it,
    which costs some microseconds each: count single steps. Compiled blocks stay compiled, and are counted.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        super().__init__()
        self._axis_of: dict[str | tuple[int, ...], str] = {}
        for axis, group in groups.items():
            # On a mesh of one long axis torch has one group for several names.
            others = self._axis_of.get(group.group_name)
            self._axis_of[group.group_name] = f"{others}+{axis}" if others else axis
            self._axis_of.setdefault(_ranks(group), axis)
        self._totals: dict[tuple[str, str], tuple[int, int]] = {}

    @property
    def rows(self) -> list[Row]:
        """One row for each axis and operation, sorted."""
        return [Row(*key, *total) for key, total in sorted(self._totals.items())]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this torch.compile would run everything uncompiled while we count."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # A mode runs before a subclass; so DTensor's own collectives come back here, and are seen.
            return NotImplemented
        if isinstance(func, torch._ops.OpOverload) and func.namespace in NAMESPACES:
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        group = next((_group(given[name]) for name in GROUPS if name in given), None)
        if group is None or group.size() == 1:
            return
        name = func._schema.name.partition("::")[2]
        assert name in _OP_OF, f"the ledger has no rule for {func}"
        op = _OP_OF[name]
        if not op:
            return
        size = sum(_num_bytes(given[name]) for name in INPUTS if name in given)
        sent = sent_bytes(op, size, group.size())
        # DTensor's caches may hold the groups of an equal mesh that was built before.
        axis = self._axis_of.get(group.group_name) or self._axis_of.get(_ranks(group), OTHER)
        key = axis, op if size > SCALARS_BYTES else "scalars"
        calls, total = self._totals.get(key, (0, 0))
        self._totals[key] = calls + 1, total + sent


def island_groups(mesh: IslandMesh) -> dict[str, ProcessGroup]:
    """The process group of each axis of the mesh that this rank is in; what FSDP shards over is one axis."""
    groups = {axis: mesh.world[axis].get_group() for axis in ("pp", "dp_replicate", "fsdp", "tp")}
    return groups | ({"cp": mesh.cp_group} if mesh.degrees.cp > 1 else {})


def _group(group: Any) -> ProcessGroup:
    """The group that an operation names: functional ones by name, others by a boxed object."""
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, str):
        return _resolve_process_group(group)  # pyright: ignore[reportArgumentType] - a NewType of str
    return ProcessGroup.unbox(group)


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _num_bytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors in lists of lists."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
