"""`diloco mesh --placements`: print which slices of every parameter the first rank of each pp
coordinate holds.

The model is built as it is placed on the mesh, without memory and without other ranks.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from diloco.config.schema import IslandConfig, RunConfig
from diloco.formatting import human_bytes
from diloco.planning.mesh.picture import print_text
from diloco.planning.mesh.step_plan import StepPlan
from diloco.planning.mesh.traffic import plain_table
from inner.dry_run.placements import FSDP_AXIS, PlacedParam, find_placements

LAYER = re.compile(r"layers\.(\d+)\.")
"""The prefix of the names of a layer's parameters."""
WIDEST = 400
"""Columns that the table leaves out."""


def show_placements(_: RunConfig, island: IslandConfig, plan: StepPlan, console: Console) -> bool:
    """Build the model as it is placed on the mesh, and print what the first rank of each pp
    coordinate holds of it.
    """
    work = plan.work
    with console.status("building the model without memory"):
        placed = find_placements(work.sizes, work.degrees, island.parallel, work.seq_len)
    console.print()
    print_text(console, "What a rank holds of each parameter", style="bold")
    table = _lie(placed)
    # The table is as wide as its content, because a name or shape that is cut off is of no use. A
    # narrow terminal breaks the lines.
    width = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    Console(file=console.file, width=max(width, console.width)).print(table)
    dims = "rows, columns" if work.sizes.experts is None else "rows, columns, experts"
    cuts = (
        f" {dims}: each rank of the axis holds a block; whole: each rank holds all."
        if placed[0].cuts
        else ""
    )
    if work.has_sparse_mesh:
        cuts += " -: the axis is one of experts alone, or of all other weights."
    print_text(
        console,
        f"Gradients, once they are reduced, and moments are placed like their parameters.{cuts}",
    )
    return True


def _lie(placed: Sequence[PlacedParam]) -> Table:
    """Return a table with a row for each parameter. Layers with equal placements share a row, with
    the bytes of all.
    """
    axes = ("dp_shard x cp" if axis == FSDP_AXIS else axis for axis, _ in placed[0].cuts)
    table = plain_table(("parameter", "layers", "shape", "pp", *axes, "held", "dtype"), ("bytes",))
    for alike in _alike(placed):
        first = alike[0]
        last = alike[-1]
        table.add_row(
            LAYER.sub("", first.name),
            _layer(first) if len(alike) == 1 else f"{_layer(first)}-{_layer(last)}",
            _times(first.shape),
            str(first.pp),
            *(cut for _, cut in first.cuts),
            _times(first.local_shape),
            first.dtype,
            human_bytes(sum(each.num_bytes for each in alike)),
        )
    for pp in sorted({each.pp for each in placed}):
        held = sum(each.num_bytes for each in placed if each.pp == pp)
        table.add_row(
            "all", "", "", str(pp), *("" for _ in placed[0].cuts), "", "", human_bytes(held)
        )
    return table


def _alike(placed: Sequence[PlacedParam]) -> list[list[PlacedParam]]:
    """Return runs of parameters of consecutive layers that differ in nothing but the number of the
    layer.
    """
    runs: list[list[PlacedParam]] = []
    newest: dict[PlacedParam, list[PlacedParam]] = {}
    for each in placed:
        kind = replace(each, name=LAYER.sub("", each.name))
        run = newest.get(kind)
        if run is None or not each.name.startswith(f"layers.{int(_layer(run[-1]) or 0) + 1}."):
            run = newest[kind] = []
            runs.append(run)
        run.append(each)
    return runs


def _layer(param: PlacedParam) -> str:
    """Return the number of the parameter's layer as text; empty if it is in no layer."""
    found = LAYER.match(param.name)
    return found[1] if found else ""


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
