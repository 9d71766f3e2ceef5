"""Count calls and bytes of every collective between an island's ranks, by mesh axis."""

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

from inner.measure.traffic.rows import (
    ALL_RANKS,
    COPIES,
    OTHER,
    SCALARS,
    SCALARS_BYTES,
    TrafficRow,
    axis_of_all_ranks,
    sent_bytes,
)
from inner.mesh import IslandMesh

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

OPS = {
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ "
    "allgather_into_tensor_coalesced_ "
    "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ "
    "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced "
    "all_reduce_coalesced_",
    "all_to_all": "alltoall_ alltoall_base_ all_to_all_single shard_dim_alltoall",
    "broadcast": "broadcast_ broadcast",
    "reduce": "reduce_",
    "gather": "gather_",
    "scatter": "scatter_",
    "send": "send isend",
    # This rank sends nothing in these, or too little to count. A receive is counted by its sender.
    "": "recv_ recv_any_source_ irecv barrier monitored_barrier_",
}
"""torch's names for each operation, in all namespaces."""
_OP_OF = {name: op for op, names in OPS.items() for name in names.split()}

INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensor", "tensors")
GROUPS = ("process_group", "group_name")
SPLITS = "input_split_sizes"
"""Names of the arguments of torch's operations: INPUTS for this rank's input, GROUPS for the
process group, SPLITS for the numbers of rows that it sends to each rank, if they differ.
"""


class CommCounter(TorchDispatchMode):
    """Counts everything that this rank sends inside `with CommCounter(groups) as counter`, in
    `counter.rows`.

    `groups` maps each axis to its process group, see island_groups. A group that two axes share is
    counted as `a+b`. An unknown group counts for the axis with the same ranks, or else as `other`.
    Groups of a single rank are left out, because nothing leaves the rank. Calls of this thread are
    counted, also those that autograd makes for it in other threads (the backward on a CUDA device),
    but not those of other Python threads. Every operation takes some microseconds longer, so count
    single steps only. Compiled blocks stay compiled, and are counted.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup], *, is_strict: bool = True) -> None:
        """`is_strict`: raise AssertionError for an operation that is not known here; otherwise
        leave it out.
        """
        super().__init__()
        self._is_strict = is_strict
        self._axis_of: dict[str | tuple[int, ...], str] = {}
        for axis, group in groups.items():
            # On a mesh with a single axis of more than one rank, torch has the same group under
            # several names.
            first = self._axis_of.get(group.group_name)
            self._axis_of[group.group_name] = f"{first}+{axis}" if first else axis
            self._axis_of.setdefault(_ranks(group), axis)
        self._totals: dict[tuple[str, str], tuple[int, int]] = {}

    @property
    def rows(self) -> list[TrafficRow]:
        """One row per axis and operation, sorted."""
        return [TrafficRow(*key, *total) for key, total in sorted(self._totals.items())]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, because torch.compile would otherwise run everything uncompiled inside the
        counter.
        """
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # A mode runs before a tensor subclass. Returning this lets DTensor go first; its
            # collectives then come back here.
            return NotImplemented
        if isinstance(func, torch._ops.OpOverload) and func.namespace in NAMESPACES:
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        arguments = {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        }
        group = next((_group(arguments[name]) for name in GROUPS if name in arguments), None)
        if group is None or group.size() == 1:
            return
        name = func._schema.name.partition("::")[2]
        if name not in _OP_OF and not self._is_strict:
            return
        assert name in _OP_OF, f"CommCounter does not know {func}"
        op = _OP_OF[name]
        if not op:
            return
        size = sum(_num_bytes(arguments[name]) for name in INPUTS if name in arguments)
        splits = arguments.get(SPLITS)
        sent = (
            _sent_of_splits(size, splits, group) if splits else sent_bytes(op, size, group.size())
        )
        # DTensor's caches may hold groups of an equal mesh that was built earlier.
        axis = self._axis_of.get(group.group_name) or self._axis_of.get(_ranks(group), OTHER)
        # An exchange with splits is one of data, also if there is nothing to send this time.
        key = axis, op if size > SCALARS_BYTES or splits else SCALARS
        calls, total = self._totals.get(key, (0, 0))
        self._totals[key] = calls + 1, total + sent


def island_groups(mesh: IslandMesh, *, has_experts: bool = False) -> dict[str, ProcessGroup]:
    """Return the process group of this rank along each axis of the mesh, and that of all ranks
    unless they are an axis. The ranks that FSDP shards over form one axis.

    `has_experts`: whether the model has experts, which may be spread over a mesh of their own.
    Every rank must call it.
    """
    groups = {axis: mesh.world[axis].get_group() for axis in ("pp", "dp_replicate", "fsdp", "tp")}
    if mesh.degrees.cp > 1:
        groups["cp"] = mesh.cp_group
    if mesh.degrees.needs_group_of_copies:
        groups[COPIES] = mesh.copies_group
    if axis_of_all_ranks(mesh.degrees) == ALL_RANKS:
        groups[ALL_RANKS] = _default_group()
    if has_experts and mesh.degrees.has_sparse_mesh:
        groups |= {axis: mesh.sparse[axis].get_group() for axis in ("edp", "ep")}
    return groups


def _default_group() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "a mesh is built of an open process group"
    return group


def _group(group: Any) -> ProcessGroup:
    """Return the process group of an operation. Functional operations pass its name, others a boxed
    object.
    """
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, str):
        return _resolve_process_group(group)  # pyright: ignore[reportArgumentType] - a NewType of str
    return ProcessGroup.unbox(group)


def _sent_of_splits(size: int, splits: list[int], group: ProcessGroup) -> int:
    """Return the bytes that leave this rank, of `size` bytes in parts of these numbers of rows."""
    rows = sum(splits)
    return size * (rows - splits[group.rank()]) // rows if rows else 0


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _num_bytes(tensors: Any) -> int:
    """Return the number of bytes of a tensor, or of all tensors in nested lists."""
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves(tensors)
        if isinstance(leaf, Tensor)
    )
