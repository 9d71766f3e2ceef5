"""`diloco mesh`: show where an island's ranks are on its mesh, what they send, and the memory they
need.

It starts no process and no process group; torch is imported only to read the order of a pipeline's
schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.config.schema import Config, IslandConfig, RunConfig, load_config
from diloco.formatting import human_bytes, human_count
from diloco.planning.mesh.ranks import expert_grids, grids, select_shown
from diloco.planning.mesh.request import MeshRequest, find_limit, find_requested_hardware
from diloco.planning.mesh.roofline import roofline_mfu, roofline_table
from diloco.planning.mesh.seconds import seconds_table
from diloco.planning.mesh.stages_table import print_stages
from diloco.planning.mesh.step_plan import StepPlan, build_step_plan, load_island
from diloco.planning.mesh.traffic import GUTTER, plain_table, traffic_table
from inner.flops import flops_per_token
from inner.measure.advice import advice
from inner.measure.param_specs import num_active, num_elements, param_specs
from inner.measure.workload import MANAGED_STAGES, Workload
from inner.mesh import AXES
from inner.model.sizes import ModelSizes
from inner.model.stage import Stage
from inner.parallel.pipeline.schedule import draw
from inner.parallel.pipeline.stages import ONE_STAGE_PER_RANK

MAX_DRAWN_RANKS = 8
MEMORY_ROWS = {
    "params": "params",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "gathered": "gathered weights",
    "activations": "activations",
    "loss": "loss",
    "working": "a layer's backward",
    "peak": "peak",
}
"""The words that the table shows for the fields of MemoryEstimate."""


def show_mesh(
    path: Path,
    overrides: list[str],
    request: MeshRequest,
    console: Console,
    more: Sequence[Callable[[RunConfig, IslandConfig, StepPlan, Console], bool]] = (),
) -> bool:
    """Print the mesh of one island. Return False if a step does not fit into the memory limit.

    `more` (dry_run.py, placements.py) are functions that build the model and print what they find.
    If one of them returns False, so does this function.

    Raises ConfigError or InputError.
    """
    config = load_config(path, overrides)
    index = request.index
    hardware = find_requested_hardware(request)
    limit = find_limit(request, hardware)
    island = load_island(config, index, limit)
    plan = build_step_plan(config.run, island)
    print_text(console, _title(config, index), style="bold")
    print_text(console, header(config.run, plan))
    if config.for_island(index).auto:
        which = (
            "the first candidate that fits"
            if limit is not None
            else "the first candidate, without a memory limit"
        )
        print_text(
            console,
            f"auto   {which}, recompute {island.parallel.recompute}; the island will measure its "
            "speed",
        )
    print_ranks(plan, console)
    print_memory(island, plan, console)
    if config.stages:
        print_stages(config.run, island, console)
    if hardware is not None:
        title = (
            f"Seconds of a step on {hardware.gpu_name} (by data sheets; each term alone, the "
            "terms overlap)"
        )
        print_section(console, title, seconds_table(plan.work, plan.tokens_per_step, hardware))
        mfu = roofline_mfu(plan.work, plan.optimizer, hardware.gpu)
        title = (
            f"Roofline of a step on {hardware.gpu_name}: MFU {mfu:.0%} at best (by data "
            "sheets, of a mean rank)"
        )
        print_section(console, title, roofline_table(plan.work, plan.optimizer, hardware.gpu))
    console.print()
    print_text(console, host_line(config, island, plan))
    verdicts = [each(config.run, island, plan, console) for each in more]
    fits = limit is None or print_verdict(plan, limit, console)
    return fits and all(verdicts)


def print_ranks(plan: StepPlan, console: Console) -> None:
    """Print where the ranks are, what each sends, and the pipeline, if there is one."""
    degrees = plan.work.degrees
    width = console.width
    name, *lines = grids(degrees, width)
    print_section(console, name, "\n".join(lines))
    if plan.work.has_sparse_mesh:
        name, *lines = expert_grids(degrees, width)
        print_section(console, name, "\n".join(lines))
    if degrees.num_ranks > 1:
        which = "" if degrees.pp == 1 else " (the pp rank that sends most)"
        print_section(
            console, f"What a rank sends in a step{which}", traffic_table(plan.work, width)
        )
    if degrees.pp > 1:
        print_section(console, *pipeline(plan, width))


def print_memory(island: IslandConfig, plan: StepPlan, console: Console) -> None:
    """Print what each pp rank holds on its device."""
    where = "the CPU" if plan.device_type == "cpu" else "a GPU"
    dtype = island.resolve_compute_dtype(plan.device_type)
    title = f"What a rank holds on {where}, computing in {dtype} (estimate)"
    print_section(console, title, memory_table(plan, console.width))


def print_verdict(plan: StepPlan, limit: int, console: Console) -> bool:
    """Print whether a step fits into `limit` bytes, and what to set if it does not. Return whether
    it fits.
    """
    fits = max(each.peak for each in plan.memory) <= limit
    text = advice(plan.work, plan.optimizer, limit, plan.device_type)
    console.print()
    print_text(console, text, style="bold green" if fits else "bold red")
    return fits


def _title(config: Config, index: int) -> str:
    count = len(config.islands)
    others = f" (island {index} of {count}; --island N shows another)" if count > 1 else ""
    return f"{config.name}, {config.for_island(index).label}{others}"


def header(run: RunConfig, plan: StepPlan) -> str:
    """Return one line each about the model, the ranks and the step."""
    work = plan.work
    sizes = plan.work.sizes
    degrees = plan.work.degrees
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in zip(AXES, degrees.sizes, strict=True))
    lines = [
        f"model  {params_text(sizes)}: {sizes.num_layers} layers, dim {sizes.dim}, "
        f"{_heads(sizes)}, vocabulary {sizes.vocab_size}",
        *_experts_lines(work),
        *_depths_lines(sizes),
        f"ranks  {degrees.num_ranks} = {mesh}",
        *_sparse_lines(work),
        f"step   {plan.tokens_per_step:,} tokens = data ranks {degrees.num_data_ranks} x "
        "micro-batches "
        f"{work.num_micro_batches} x sequences {work.micro_batch} x length {work.seq_len}",
    ]
    if plan.is_vocabulary_assumed:
        lines.append(
            f"       (vocabulary assumed, {run.data.tokenizer!r} is not here: set model.vocab_size)"
        )
    return "\n".join(lines)


def params_text(sizes: ModelSizes) -> str:
    """Return the number of parameters, and how many of them a token uses if it does not use all."""
    text = f"{human_count(num_elements(param_specs(sizes)))} parameters"
    return text if sizes.experts is None else f"{text}, {human_count(num_active(sizes))} active"


def _heads(sizes: ModelSizes) -> str:
    latent = sizes.latent
    if latent is None:
        return f"{sizes.num_heads} heads ({sizes.num_kv_heads} kv)"
    return (
        f"{sizes.num_heads} heads (keys of {latent.qk_dim}, values of {latent.value_dim}, from "
        f"{latent.kv_rank})"
    )


def _experts_lines(work: Workload) -> list[str]:
    """Return lines about the experts and what a token costs."""
    sizes = work.sizes
    experts = sizes.experts
    if experts is None:
        return []
    shared = f" and {experts.shared} shared" if experts.shared else ""
    layers = len(sizes.expert_layers)
    flops = flops_per_token(sizes, work.seq_len).total
    return [
        f"       {layers} layers have {experts.number} experts of width {experts.dim}; a token "
        f"uses {experts.per_token} of them{shared}",
        f"       {flops / 1e9:.3g} GFLOP per token, forward and backward, of the weights that it "
        "uses",
    ]


def _sparse_lines(work: Workload) -> list[str]:
    """Return lines about how experts are spread over the ranks, if that is in a way of their
    own.
    """
    if not work.has_sparse_mesh:
        return []
    degrees = work.degrees
    return [
        f"       for experts edp {degrees.edp} x ep {degrees.ep}: a rank computes with "
        f"{work.num_held_experts} experts "
        f"of a layer, on {work.num_rows:,} rows of a micro-batch if each expert gets equally many",
    ]


def _depths_lines(sizes: ModelSizes) -> list[str]:
    """Return lines about extra depths of multi-token prediction, and how they are estimated."""
    if sizes.predict is None:
        return []
    of_depths = num_elements(param_specs(sizes)) - num_elements(
        param_specs(replace(sizes, predict=None))
    )
    return [
        f"       {sizes.num_depths} extra depths predict further tokens in training, with "
        f"{human_count(of_depths)} of "
        "the parameters, on the last stage",
        "       (the estimate of memory counts each of them as a further layer with a loss of its "
        "own)",
    ]


def print_text(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style))


def print_section(console: Console, name: str, content: str | Table) -> None:
    """Print a blank line, the section's name and its content."""
    console.print()
    print_text(console, name, style="bold")
    console.print(Text(content) if isinstance(content, str) else content)


def pipeline(plan: StepPlan, width: int) -> tuple[str, str]:
    """Return a title with the key figures of the pipeline's schedule, and a drawing of the
    schedule.
    """
    work = plan.work
    simulation = plan.simulation
    schedule = work.parallel.schedule
    pp = work.degrees.pp
    name = (
        f"Pipeline: {schedule}, {len(work.stages)} stages on {pp} ranks; bubble "
        f"{100 * simulation.bubble:.3g} %, "
        "if backward = 2 x forward"
    )
    *lanes, legend = draw(simulation, width).splitlines()
    shown_lanes = [
        ("..." if lane is None else lanes[lane]) for lane in select_shown(pp, MAX_DRAWN_RANKS)
    ]
    # With ZeRO-3 no weights stay gathered after their use, and whole weights are never gathered.
    stays_gathered = not work.frees_after_forward and not work.has_whole_weights
    is_noted = stays_gathered and schedule not in ONE_STAGE_PER_RANK
    note = [_gathered_note(len(work.stages) // pp)] if is_noted else []
    return name, "\n".join([*shown_lanes, legend, *note])


def _gathered_note(stages_per_rank: int) -> str:
    """Explain what torch's runtime does with the weights of several stages on a rank."""
    if stages_per_rank <= MANAGED_STAGES:
        return (
            f"The weights of a rank's {stages_per_rank} stages stay gathered from first to last "
            f"use (torch keeps the next {MANAGED_STAGES})."
        )
    return (
        f"Of a rank's {stages_per_rank} stages torch keeps the weights of the next "
        f"{MANAGED_STAGES} gathered, and gathers the weights of the other stages again."
    )


def host_line(config: Config, island: IslandConfig, plan: StepPlan) -> str:
    """Return one line about the memory that an average rank needs on the host."""
    # Imported here because it imports torch, and the other lines are printed without waiting for
    # torch.
    from diloco.planning.mesh.host_memory import estimate_host_memory

    num_islands = max(len(config.islands), config.outer.start_islands)
    specs = param_specs(plan.work.sizes)
    host = estimate_host_memory(
        config.run, island, plan.device_type, specs, num_islands, plan.memory
    )
    return (
        f"host memory of a rank, with the outer loop: at least {human_bytes(host.least)}, and "
        f"{human_bytes(host.estimate)} if all is needed at once; `diloco plan` shows each purpose"
    )


def memory_table(plan: StepPlan, width: int) -> Table:
    """Return a table of layers, micro-batches in flight and bytes, with as many pp coordinates as
    fit into `width`.
    """
    rows = memory_rows(plan)
    label_width = max(len(label) for label, _ in rows)
    cell_width = max(len(cell) for _, cells in rows for cell in cells)
    columns = select_shown(
        plan.work.degrees.pp, max(3, (width - label_width - GUTTER) // (cell_width + GUTTER))
    )
    heads = ["..." if column is None else f"pp {column}" for column in columns]
    if len(heads) == 1:
        heads = ["any rank"]
    table = plain_table(("",), tuple(heads))
    for label, cells in rows:
        table.add_row(label, *("..." if column is None else cells[column] for column in columns))
    return table


def memory_rows(plan: StepPlan) -> list[tuple[str, list[str]]]:
    """Return the label and values of each row; values are listed by pp coordinate."""
    work = plan.work
    memory = plan.memory
    rows = [("layers", [_layers(work.stages_at(pp_rank)) for pp_rank in range(work.degrees.pp)])]
    if work.degrees.pp > 1:
        rows.append(("live micro-batches", [str(live) for live in plan.simulation.peak_live]))
    rows += [
        (name, [human_bytes(getattr(each, field)) for each in memory])
        for field, name in MEMORY_ROWS.items()
    ]
    if work.sizes.experts is not None and work.degrees.ep > 1:
        rows.append(
            ("peak if all rows arrive", [human_bytes(each.peak) for each in plan.worst_memory])
        )
    return rows


def _layers(stages: Sequence[Stage]) -> str:
    """Return `embed 0-1` for the first stage, `14-15 head` for the last; commas separate several
    stages.
    """
    texts = []
    for stage in stages:
        layers = (
            f"{stage.layers[0]}-{stage.layers[-1]}"
            if len(stage.layers) > 1
            else str(stage.layers[0])
        )
        texts.append("embed " * stage.is_first + layers + " head" * stage.is_last)
    return ", ".join(texts)
