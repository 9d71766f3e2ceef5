"""`diloco mesh --dry-run`: run an inner step of some ranks on a device that computes nothing.

Its memory and traffic are compared with the plan. Each rank is rehearsed in a process of its own
(`python -m inner.dry_run`), which needs neither a GPU nor other ranks.
"""

import subprocess
import sys
from dataclasses import dataclass, replace

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from diloco.config.schema import IslandConfig, RunConfig
from diloco.errors import ConfigError
from diloco.formatting import human_bytes, human_count, human_seconds
from diloco.planning.mesh.picture import print_section, print_text
from diloco.planning.mesh.step_plan import StepPlan
from diloco.planning.mesh.traffic import plain_table
from diloco.watchdog.life_signs import life_signs
from inner.dry_run.case import Rehearsal, RehearsalResult
from inner.measure.traffic.expected import expected_traffic
from inner.measure.traffic.rows import SCALARS, TrafficRow, merge_axes
from inner.mesh import Degrees

LIMIT_SECONDS = 3600.0
"""Time limit for the rehearsal of one rank."""
EOS_ID = 0
"""The end-of-sequence token of the rehearsal. Any number will do, because the texts have no
content."""


@dataclass(frozen=True)
class RankReport:
    """What a rank sent and held in its rehearsal, and what was planned for it."""

    done: RehearsalResult
    planned_peak: int
    planned_traffic: list[TrafficRow]
    degrees: Degrees

    @property
    def traffic(self) -> list[TrafficRow]:
        """The rank's traffic, without the few bytes of bookkeeping."""
        return [row for row in self.done.traffic if row.op != SCALARS]

    @property
    def is_as_planned(self) -> bool:
        """Whether the rank has sent exactly the planned traffic."""
        return not self.differences

    @property
    def differences(self) -> list[str]:
        """One line for each kind of traffic that was not planned, or that differs from its plan."""
        planned = {
            (row.axis, row.op): row for row in merge_axes(self.planned_traffic, self.degrees)
        }
        done = {(row.axis, row.op): row for row in merge_axes(self.traffic, self.degrees)}
        lines = []
        for key in sorted(planned.keys() | done.keys()):
            if (here := done.get(key)) != (there := planned.get(key)):
                lines.append(
                    f"rank {self.done.rank}, {' '.join(key)}: {_amount(here)}; planned: "
                    f"{_amount(there)}"
                )
        return lines


def show_dry_run(run: RunConfig, island: IslandConfig, plan: StepPlan, console: Console) -> bool:
    """Rehearse the first, a middle and the last rank and print what they did.

    Returns False if a rank sent data from the wrong device. Raises ConfigError if a rehearsal
    fails.
    """
    plan = replace(plan, device_type="cuda")
    num_ranks = plan.work.degrees.num_ranks
    reports: list[RankReport] = []
    ranks = sorted({0, num_ranks // 2, num_ranks - 1})
    with life_signs(
        f"dry run of ranks {', '.join(map(str, ranks))}", lambda: len(reports) / len(ranks)
    ):
        for rank in ranks:
            reports.append(_report(run, island, plan, rank))
    seconds = human_seconds(max(report.done.seconds for report in reports))
    print_section(
        console,
        f"Dry run of a step on a device that computes nothing ({seconds} per rank)",
        _table(reports),
    )
    notes = [line for report in reports for line in report.differences]
    if (experts := plan.work.sizes.experts) is not None:
        notes.append(
            f"tokens go to the experts evenly: {experts.per_token} rows per token, of which each "
            f"of {experts.number} "
            "experts computes as many, and ranks of ep send each other equally many"
        )
    if island.parallel.compile is not False and plan.device_type == "cuda":
        notes.append("torch.compile is left out of a dry run")
    if notes:
        print_text(console, "\n".join(notes))
    print_section(
        console,
        "Where host and device wait for each other in a step of rank 0",
        _crossings(reports[0].done),
    )
    misplaced = [
        f"rank {report.done.rank}: {what}" for report in reports for what in report.done.misplaced
    ]
    if misplaced:
        print_text(
            console, "\n".join(["data sent from the wrong device:", *misplaced]), style="bold red"
        )
    return not misplaced


def _report(run: RunConfig, island: IslandConfig, plan: StepPlan, rank: int) -> RankReport:
    case = Rehearsal(
        sizes=plan.work.sizes,
        degrees=plan.work.degrees,
        parallel=plan.work.parallel.model_copy(update={"compile": False}),
        optimizer=run.optimizer,
        seq_len=run.data.seq_len,
        micro_batch=island.micro_batch,
        compute_dtype=island.resolve_compute_dtype(plan.device_type),
        eos_id=EOS_ID if run.data.document_mask else None,
        rank=rank,
    )
    done = rehearse_apart(case)
    pp_rank = done.coordinates["pp"]
    return RankReport(
        done, plan.memory[pp_rank].peak, expected_traffic(plan.work, pp_rank), plan.work.degrees
    )


def rehearse_apart(case: Rehearsal) -> RehearsalResult:
    """Rehearse in another process. Raises ConfigError with its output if it fails or takes longer
    than LIMIT_SECONDS.
    """
    command = [sys.executable, "-m", "inner.dry_run"]
    body = TypeAdapter(Rehearsal).dump_json(case)
    try:
        ended = subprocess.run(
            command, input=body, capture_output=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--dry-run: rank {case.rank} did not finish a step within {LIMIT_SECONDS:g} s"
        ) from None
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip()
        raise ConfigError(f"--dry-run: the rehearsal of rank {case.rank} failed: {said[-2000:]}")
    return TypeAdapter(RehearsalResult).validate_json(ended.stdout)


def _table(reports: list[RankReport]) -> Table:
    table = plain_table(
        ("rank", "place"), ("parameters", "peak", "estimate", "", "sent", "as planned")
    )
    for report in reports:
        done = report.done
        rows = report.traffic
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
