"""The table of an experiment has a column for the load of experts where a row is a mixture."""

from pathlib import Path

from diloco.experiments.definition.build import build_rows
from diloco.experiments.definition.schema import load_experiment
from diloco.experiments.results.run_result import RunResult
from diloco.experiments.results.table import HEADINGS, build_table, format_table

FILE = Path(__file__).parents[3] / "configs/experiments/experts.yaml"


def result(load: float | None) -> RunResult:
    return RunResult(
        curve=[(1000, 2.0)], sent_bytes=10.0, core_seconds=1.0, steps_timed=1, expert_load=load
    )


def test_the_load_of_experts_is_shown_for_rows_with_experts_only() -> None:
    rows = build_rows(load_experiment(FILE))
    loads = {
        row.row_id: 1.25 if row.config.model.experts is not None else None for row in rows.rows
    }
    seconds = dict.fromkeys(loads, 0.01)
    lines = build_table(
        rows, {row_id: {0: result(load)} for row_id, load in loads.items()}, seconds, 4
    )
    headings, *cells = format_table(lines)
    assert headings == (*HEADINGS, "fullest expert")
    assert {cell[-1] for cell in cells} == {"1.25", "-"} and len(cells) == 10
    dense = [line for line in lines if line.expert_load is None]
    assert format_table(dense)[0] == HEADINGS
    assert sum("experts by routed tokens" in line.row.label for line in lines) == 3
    assert sum("experts every 4 rounds" in line.row.label for line in lines) == 2
