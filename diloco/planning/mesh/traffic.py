"""The table of an inner step's traffic between an island's ranks, by mesh axis. Imports torch only
for pp > 1.
"""

from typing import NamedTuple

from rich.table import Table

from diloco.formatting import human_bytes
from diloco.planning.mesh.ranks import groups_text, rank_groups
from inner.measure.traffic.expected import axis_of_copies, expected_traffic
from inner.measure.traffic.rows import ALL_RANKS, COPIES, OTHER, TrafficRow, axis_of_all_ranks
from inner.measure.workload import Workload
from inner.mesh import AXES, Degrees

HEADS = ("axis", "groups", "their ranks", "what moves", "calls", "sent")
COPIES_TEXT = "dp_replicate x cp"
GUTTER = 2
"""Blank columns between two columns of a table."""


class TrafficLine(NamedTuple):
    """One kind of traffic along an axis, or an axis that has no traffic of its own."""

    axis: str
    groups: list[list[int]]
    """Groups of ranks that communicate."""
    what: str
    calls: int
    sent_bytes: int


def traffic_table(work: Workload, width: int) -> Table:
    """Return a table of each axis, its groups of ranks, and what a rank sends within its group in
    one inner step.
    """
    lines = traffic_lines(work)
    cells = [_cells(line, before) for line, before in zip(lines, [None, *lines], strict=False)]
    lengths = [max(map(len, column)) for column in zip(HEADS, *cells, strict=True)]
    room = max(len(HEADS[2]), width - sum(lengths) - GUTTER * len(HEADS) + lengths[2])
    table = plain_table(HEADS[:4], HEADS[4:])
    for line, (axis, count, _, *figures) in zip(lines, cells, strict=True):
        table.add_row(axis, count, groups_text(line.groups, room) if axis else "", *figures)
    return table


def plain_table(texts: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    """Return a table without borders: first the text columns, then right-aligned number columns."""
    table = Table(box=None, padding=(0, GUTTER, 0, 0), pad_edge=False)
    for head in texts:
        table.add_column(head, no_wrap=True)
    for head in numbers:
        table.add_column(head, no_wrap=True, justify="right")
    return table


def traffic_lines(work: Workload) -> list[TrafficLine]:
    """Return the traffic in the order of the axes. Each figure is for the pp coordinate that sends
    most.
    """
    sent = _most_sent(work)
    degrees = work.degrees
    lines = []
    for name, members in _groups(work).items():
        moved = [
            TrafficLine(name, members, what, *figures)
            for (axis, what), figures in sent.items()
            if axis == name
        ]
        # FSDP communicates over dp_shard x cp, and dp_shard then has no traffic of its own. The
        # same holds for replicas along two axes.
        copies = _axis_text(axis_of_copies(degrees))
        both = copies if work.has_whole_weights else "dp_shard x cp"
        lines += moved or [TrafficLine(name, members, f"see {both}", 0, 0)]
    return lines


def _groups(work: Workload) -> dict[str, list[list[int]]]:
    """Return the groups of ranks that communicate, by axis or by combined axes of more than one
    rank.
    """
    degrees = work.degrees
    combinations: list[tuple[str, ...]] = [(axis,) for axis in AXES]
    if degrees.dp_shard > 1 and degrees.cp > 1:
        combinations.insert(-1, ("dp_shard", "cp"))
    if degrees.needs_group_of_copies and work.has_whole_weights:
        combinations.insert(-1, ("dp_replicate", "cp"))
    by_axes = {
        " x ".join(axes): rank_groups(degrees, *axes)
        for axes in combinations
        if all(getattr(degrees, axis) > 1 for axis in axes)
    }
    if work.has_sparse_mesh:
        by_axes |= {
            axis: rank_groups(degrees, axis) for axis in ("edp", "ep") if getattr(degrees, axis) > 1
        }
    sums_over_all = work.has_whole_weights and axis_of_copies(degrees) == ALL_RANKS
    if sums_over_all or (
        work.sizes.experts is not None and axis_of_all_ranks(degrees) == ALL_RANKS
    ):
        by_axes[ALL_RANKS] = [list(range(degrees.num_ranks))]
    if work.sizes.last_stage_embeds and work.stage_ranks[0] != work.stage_ranks[-1]:
        by_axes["ends of pp"] = [[group[0], group[-1]] for group in by_axes["pp"]]
    return by_axes


def _most_sent(work: Workload) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (calls, bytes) by axis and kind of traffic, for the pp rank that sends most."""
    most: dict[tuple[str, str], tuple[int, int]] = {}
    for pp_rank in range(work.degrees.pp):
        here: dict[tuple[str, str], tuple[int, int]] = {}
        for row in expected_traffic(work, pp_rank):
            key = _axis(row, work.degrees), _what(row, work)
            calls, num_bytes = here.get(key, (0, 0))
            here[key] = calls + row.calls, num_bytes + row.sent_bytes
        for key, figures in here.items():
            most[key] = max(most.get(key, (0, 0)), figures, key=lambda pair: pair[1])
    return most


def _axis(row: TrafficRow, degrees: Degrees) -> str:
    """Return the mesh axes of a row, as the table shows them."""
    if row.axis == "fsdp":
        return " x ".join(axis for axis in ("dp_shard", "cp") if getattr(degrees, axis) > 1)
    return _axis_text(row.axis)


def _axis_text(axis: str) -> str:
    return {OTHER: "ends of pp", COPIES: COPIES_TEXT}.get(axis, axis)


def _what(row: TrafficRow, work: Workload) -> str:
    """Return the kind of traffic. Gradients of activations, keys and values are counted with the
    values themselves.
    """
    if row.axis == "ep":
        return "rows of tokens"
    if row.axis in ("fsdp", "tp", "edp") and row.op == "all_to_all":
        return "Muon's matrices"
    is_replicas = row.axis == "dp_replicate"
    if work.has_whole_weights:
        is_replicas = row.axis in ("dp_replicate", "fsdp", axis_of_copies(work.degrees))
    if is_replicas:
        return "Muon's updates" if row.op == "all_gather" else "gradients"
    if row.axis == ALL_RANKS or (row.axis in ("fsdp", "cp") and row.op == "all_reduce"):
        return "loads of experts"
    if row.axis == "cp":
        return "heads" if work.parallel.context == "ulysses" else "keys and values"
    if row.axis == "fsdp":
        return "weights" if row.op == "all_gather" else "gradients"
    if row.axis == "edp":
        return "weights of experts" if row.op == "all_gather" else "gradients of experts"
    if row.axis == "tp" and row.op == "all_reduce" and work.parallel.splits_stream(work.degrees.tp):
        return "norms and loss"
    return {"pp": "activations", "tp": "activations", OTHER: "tied table"}.get(
        row.axis, "gradients"
    )


def _cells(line: TrafficLine, before: TrafficLine | None) -> tuple[str, ...]:
    """Return the cells of a table row, without its ranks. The axis is left out if the row before
    has the same axis.
    """
    is_new = before is None or before.axis != line.axis
    names = (line.axis, f"{len(line.groups)} x {len(line.groups[0])}") if is_new else ("", "")
    calls, sent = (str(line.calls), human_bytes(line.sent_bytes)) if line.calls else ("", "")
    return (*names, "", line.what, calls, sent)
