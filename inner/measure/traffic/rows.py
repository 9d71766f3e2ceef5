"""Rows of traffic between an island's ranks: calls and bytes by mesh axis and operation. No torch
here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from inner.mesh import Degrees

GRADIENT_BYTES = 4
"""Bytes per element of gradients, which are reduced in fp32."""
OTHER = "other"
"""Axis name for groups that do not lie along an axis of the mesh."""
ALL_RANKS = "all ranks"
"""Axis name for the group of all ranks of a mesh with several axes of more than one rank."""
COPIES = "copies"
"""Axis name for the group of the ranks of dp_replicate x fsdp, if both have more than one rank."""
SCALARS = "scalars"
"""Name of collectives of a few bytes, such as losses, norms and counts. They are not predicted."""
SCALARS_BYTES = 64
"""Collectives of at most this size are counted as SCALARS."""
AXES_OF_GROUPS = ("pp", "dp_replicate", "fsdp", "cp", "tp", "edp", "ep", ALL_RANKS, COPIES)
"""The axes along which ranks communicate. fsdp is dp_shard and cp together."""


@dataclass(frozen=True, order=True)
class TrafficRow:
    """Traffic that one rank sends along one axis of the mesh by one kind of operation."""

    axis: str
    op: str
    calls: int
    sent_bytes: int


def sent_bytes(op: str, size: int, num_ranks: int) -> int:
    """Return the bytes that one rank sends in one call with `size` bytes of input, in a ring of
    `num_ranks`.

    all_gather                            (n - 1) x size         each piece passes every link but
                                          one
    reduce_scatter, all_to_all            (n - 1) / n x size
    all_reduce                            2 (n - 1) / n x size   a reduce-scatter, and an all-gather
                                          of its result
    broadcast, reduce, gather, scatter    (n - 1) / n x size     the mean over the ranks
    send                                  size

    No algorithm sends less than a ring; others in NCCL or gloo may send more.
    """
    if op == "send":
        return size
    if op == "all_gather":
        return (num_ranks - 1) * size
    times = 2 if op == "all_reduce" else 1
    return times * (num_ranks - 1) * size // num_ranks


class Tally:
    """Adds up calls and bytes by axis and operation."""

    def __init__(self, degrees: Degrees) -> None:
        self._num_ranks = {axis: size_of(degrees, axis) for axis in AXES_OF_GROUPS}
        self._num_ranks[OTHER] = 2
        self._totals: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, axis: str, op: str, calls: int, size: int) -> None:
        """Add `calls` of an operation with `size` bytes of input each."""
        if calls == 0 or size <= SCALARS_BYTES or self._num_ranks[axis] == 1:
            return
        self.add_sent(axis, op, calls, calls * sent_bytes(op, size, self._num_ranks[axis]))

    def add_sent(self, axis: str, op: str, calls: int, sent: int) -> None:
        """Add `calls` of an operation in which this rank sends `sent` bytes in all."""
        if calls == 0 or self._num_ranks[axis] == 1:
            return
        before = self._totals.get((axis, op), (0, 0))
        self._totals[axis, op] = before[0] + calls, before[1] + sent

    @property
    def rows(self) -> list[TrafficRow]:
        return [TrafficRow(*key, *total) for key, total in sorted(self._totals.items())]


def size_of(degrees: Degrees, axis: str) -> int:
    """Return the number of ranks along an axis of AXES_OF_GROUPS."""
    several = {ALL_RANKS: degrees.num_ranks, COPIES: degrees.num_copies}
    return several[axis] if axis in several else getattr(degrees, axis)


def axis_of_all_ranks(degrees: Degrees) -> str:
    """Return the axis that has all ranks of the mesh, or ALL_RANKS if no single axis has them."""
    axes = ("pp", "dp_replicate", "fsdp", "tp")
    return next((axis for axis in axes if getattr(degrees, axis) == degrees.num_ranks), ALL_RANKS)


def merge_axes(rows: Iterable[TrafficRow], degrees: Degrees) -> list[TrafficRow]:
    """Return the rows of axes that have the same groups of ranks as rows of one axis, sorted.

    torch may have a single group for such axes, for example for fsdp and ep if ep spans all ranks.
    A counter then cannot tell them apart, and names the group by all of them: `fsdp+ep`.
    """
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        key = _first_alike(degrees, row.axis.partition("+")[0]), row.op
        before = totals.get(key, (0, 0))
        totals[key] = before[0] + row.calls, before[1] + row.sent_bytes
    return [TrafficRow(*key, *total) for key, total in sorted(totals.items())]


def _first_alike(degrees: Degrees, axis: str) -> str:
    """Return the first axis whose groups have the same ranks."""
    if axis not in AXES_OF_GROUPS:
        return axis
    return next(
        each
        for each in AXES_OF_GROUPS
        if _shape_of_group(degrees, each) == _shape_of_group(degrees, axis)
    )


def _shape_of_group(degrees: Degrees, axis: str) -> tuple[int, int]:
    """Return the number of ranks of a group, and the difference between neighbours in it."""
    fsdp = degrees.tp
    dp_replicate = fsdp * degrees.fsdp
    strides = {
        "pp": dp_replicate * degrees.dp_replicate,
        "dp_replicate": dp_replicate,
        "fsdp": fsdp,
        "cp": fsdp,
        COPIES: fsdp,
        "edp": degrees.ep,
    }
    return size_of(degrees, axis), strides.get(axis, 1)
