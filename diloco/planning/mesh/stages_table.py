"""The table of a run's stages: what a step is made of in each, and the memory that it needs."""

from rich.console import Console
from rich.table import Table

from diloco.config.schema import IslandConfig, RunConfig, stage_rounds
from diloco.formatting import human_bytes, human_count
from diloco.planning.mesh.step_plan import StepPlan, build_stage_plans
from diloco.planning.mesh.traffic import plain_table, traffic_lines
from inner.flops import flops_per_token


def print_stages(run: RunConfig, island: IslandConfig, console: Console) -> None:
    """Print a line for each stage of the run. The rest of the picture is of the one with the
    highest peak.
    """
    plans = build_stage_plans(run, island)
    heaviest = max(range(len(plans)), key=lambda number: plans[number].peak)
    console.print()
    title = (
        f"Stages of the run; everything else here is of stage {heaviest + 1}, which needs "
        "most memory"
    )
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(stages_table(run, plans))


def stages_table(run: RunConfig, plans: list[StepPlan]) -> Table:
    """Return the table. `plans`: those of `build_stage_plans`."""
    heads = (
        "from round",
        "tokens per step",
        "length",
        "micro-batches",
        "peak of a rank",
        "sent by a rank",
        "FLOPs per token",
    )
    table = plain_table(("stage",), heads)
    firsts = (0, *stage_rounds(run))
    for number, (first, plan) in enumerate(zip(firsts, plans, strict=True), 1):
        flops = flops_per_token(plan.work.sizes, plan.work.seq_len).total
        table.add_row(
            str(number),
            str(first),
            f"{plan.tokens_per_step:,}",
            str(plan.work.seq_len),
            str(plan.work.num_micro_batches),
            human_bytes(plan.peak),
            human_bytes(sum(line.sent_bytes for line in traffic_lines(plan.work))),
            human_count(flops),
        )
    return table
