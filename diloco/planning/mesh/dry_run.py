"""`diloco mesh --dry-run`: an inner step of some ranks on an accelerator that computes nothing, beside the plan.

Each rank is rehearsed by a process of its own (`python -m inner.dry_run`), which needs neither a GPU nor other ranks.
`--placements` only builds the model, without memory, and lists what the first rank holds of each parameter.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from diloco.config.schema import IslandConfig, RunConfig
from diloco.errors import ConfigError
from diloco.formatting import human_bytes, human_count, human_seconds
from diloco.planning.mesh.picture import print_section, print_text
from diloco.planning.mesh.step_plan import StepPlan
from diloco.planning.mesh.traffic import plain_table
from inner.dry_run.case import Rehearsal, RehearsalResult
from inner.dry_run.placements import FSDP_AXIS, PlacedParam, find_placements
from inner.measure.traffic.expected import SCALARS, TrafficRow, expected_traffic

LIMIT_SECONDS = 3600.0
"""Longest time for one rank."""
EOS_ID = 0
"""Any token will do: texts have no values here."""
LAYER = re.compile(r"layers\.(\d+)\.")
"""What a parameter's name begins with in a layer."""
WIDEST = 400
"""Columns that no table needs."""


@dataclass(frozen=True)
class RankReport:
    """What a rank has done, and what was planned."""

    done: RehearsalResult
    planned_peak: int
    planned_traffic: list[TrafficRow]

    @property
    def traffic(self) -> list[TrafficRow]:
        """What the rank has sent, without bookkeeping of a few bytes."""
        return [row for row in self.done.traffic if row.op != SCALARS]

    @property
    def is_as_planned(self) -> bool:
        """Whether it has sent exactly what was planned."""
        return sorted(self.traffic) == sorted(self.planned_traffic)

    @property
    def differences(self) -> list[str]:
        """Lines about the traffic that was not planned, or not so."""
        planned = {(row.axis, row.op): row for row in self.planned_traffic}
        done = {(row.axis, row.op): row for row in self.traffic}
        lines = []
        for key in sorted(planned.keys() | done.keys()):
            if (here := done.get(key)) != (there := planned.get(key)):
                lines.append(f"rank {self.done.rank}, {' '.join(key)}: {_amount(here)}; planned: {_amount(there)}")
        return lines


def show_dry_run(run: RunConfig, island: IslandConfig, plan: StepPlan, console: Console) -> bool:
    """Rehearse the first, a middle and the last rank and print what they did.

    Returns False if a rank sent from the wrong device. Raises ConfigError if a rehearsal fails.
    """
    plan, num_ranks, reports = replace(plan, device_type="cuda"), plan.work.degrees.num_ranks, []
    for rank in sorted({0, num_ranks // 2, num_ranks - 1}):
        with console.status(f"dry run of rank {rank} of {num_ranks}"):
            reports.append(_report(run, island, plan, rank))
    seconds = human_seconds(max(report.done.seconds for report in reports))
    print_section(console, f"Dry run of a step on a device that computes nothing ({seconds} a rank)", _table(reports))
    notes = [line for report in reports for line in report.differences]
    if island.parallel.compile is not False and plan.device_type == "cuda":
        notes.append("torch.compile is left out of a dry run")
    if notes:
        print_text(console, "\n".join(notes))
    print_section(console, "Where host and device wait for each other in a step of rank 0", _crossings(reports[0].done))
    misplaced = [f"rank {report.done.rank}: {what}" for report in reports for what in report.done.misplaced]
    if misplaced:
        print_text(console, "\n".join(["sent from the wrong device:", *misplaced]), style="bold red")
    return not misplaced


def _report(run: RunConfig, island: IslandConfig, plan: StepPlan, rank: int) -> RankReport:
    case = Rehearsal(
        sizes=plan.work.sizes,
        degrees=plan.work.degrees,
        parallel=island.parallel.model_copy(update={"compile": False}),
        optimizer=run.optimizer,
        seq_len=run.data.seq_len,
        micro_batch=island.micro_batch,
        compute_dtype=island.resolve_compute_dtype(plan.device_type),
        eos_id=EOS_ID if run.data.document_mask else None,
        rank=rank,
    )
    done = rehearse_apart(case)
    pp_rank = done.coordinates["pp"]
    return RankReport(done, plan.memory[pp_rank].peak, expected_traffic(plan.work, pp_rank))


def show_placements(_: RunConfig, island: IslandConfig, plan: StepPlan, console: Console) -> bool:
    """Build the model as it lies on the mesh, and print what the first rank of each pp coordinate holds of it."""
    work = plan.work
    with console.status("building the model without memory"):
        placed = find_placements(work.sizes, work.degrees, island.parallel, work.seq_len)
    console.print()
    print_text(console, "What a rank holds of each parameter", style="bold")
    table = _lie(placed)
    # A name or shape that is cut off would be of no use; a narrow terminal breaks the lines.
    width = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    Console(file=console.file, width=max(width, console.width)).print(table)
    cuts = " rows, columns: each rank of the axis holds a block of them; whole: all." if placed[0].cuts else ""
    print_text(console, f"Gradients, when they are reduced, and moments lie as their parameters.{cuts}")
    return True


def _lie(placed: Sequence[PlacedParam]) -> Table:
    """A row for each parameter; layers that lie alike are one row, with the bytes of all."""
    axes = ("dp_shard x cp" if axis == FSDP_AXIS else axis for axis, _ in placed[0].cuts)
    table = plain_table(("parameter", "layers", "shape", "pp", *axes, "held", "dtype"), ("bytes",))
    for alike in _alike(placed):
        first, last = alike[0], alike[-1]
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
        table.add_row("all", "", "", str(pp), *("" for _ in placed[0].cuts), "", "", human_bytes(held))
    return table


def _alike(placed: Sequence[PlacedParam]) -> list[list[PlacedParam]]:
    """Runs of parameters that differ in the number of their layer alone, of layers one after the other."""
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
    """The number of its layer, or nothing."""
    found = LAYER.match(param.name)
    return found[1] if found else ""


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def rehearse_apart(case: Rehearsal) -> RehearsalResult:
    """Rehearse in another process. Raises ConfigError with what it has said if it fails or takes too long."""
    command = [sys.executable, "-m", "inner.dry_run"]
    body = TypeAdapter(Rehearsal).dump_json(case)
    try:
        ended = subprocess.run(command, input=body, capture_output=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--dry-run: rank {case.rank} did not finish a step within {LIMIT_SECONDS:g} s") from None
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip()
        raise ConfigError(f"--dry-run: rank {case.rank} has failed: {said[-2000:]}")
    return TypeAdapter(RehearsalResult).validate_json(ended.stdout)


def _table(reports: list[RankReport]) -> Table:
    table = plain_table(("rank", "place"), ("parameters", "peak", "estimate", "", "sent", "as planned"))
    for report in reports:
        done, rows = report.done, report.traffic
        table.add_row(
            str(done.rank),
            f"pp {done.coordinates['pp']}",
            human_count(done.num_params),
            human_bytes(done.peak_bytes),
            human_bytes(report.planned_peak),
            f"{100 * (done.peak_bytes / report.planned_peak - 1):+.1f} %",
            human_bytes(sum(row.sent_bytes for row in rows)),
            "yes" if report.is_as_planned else "no",
        )
    return table


def _crossings(done: RehearsalResult) -> Table:
    table = plain_table(("what, where",), ("times",))
    for what, times in sorted(done.crossings.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(what, str(times))
    return table


def _amount(row: TrafficRow | None) -> str:
    return "nothing" if row is None else f"{human_bytes(row.sent_bytes)} in {row.calls} calls"
