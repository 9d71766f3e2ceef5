"""`diloco mesh`: an island's mesh before anything is launched: who is where, what they send, what they hold.

Starts no process and no process group; torch is imported only to read the order of a pipeline's schedule.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.check import check_island
from diloco.config import Config, ConfigError, IslandConfig, RunConfig, load_config
from diloco.mesh_ranks import grids, shown
from diloco.mesh_traffic import GUTTER, plain_table, traffic_table
from diloco.units import human_bytes, human_count
from inner.data.tokenizer import tokenizer_fingerprint, vocab_size_of
from inner.measure.advice import advice
from inner.measure.gathers import MANAGED_STAGES
from inner.measure.memory import Memory, estimate
from inner.measure.units import Workload
from inner.mesh import AXES, accumulation, resolve_degrees
from inner.parallel.schedule import Simulation, draw, simulate
from inner.parallel.stages import SINGLE, Stage
from inner.presets import BYTE_VOCAB_SIZE, PRESETS, num_params, resolve_sizes

ITEMSIZES = {"float32": 4, "bfloat16": 2}
MAX_DRAWN_RANKS = 8
UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
UNITS |= {"KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4}
MEMORY_ROWS = {
    "params": "params",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "gathered": "gathered weights",
    "activations": "activations",
    "loss": "loss",
    "working": "a layer's backward",
    "peak": "peak",
    "outer": "outer, on the CPU",
}
"""Fields of Memory, and how they are called."""


@dataclass(frozen=True)
class Plan:
    """What a step is, whose optimizer steps it, and where."""

    work: Workload
    optimizer: str
    device_type: str
    is_vocabulary_assumed: bool

    @cached_property
    def simulation(self) -> Simulation:
        """Of the pipeline's schedule."""
        return simulate(self.work.orders)

    @cached_property
    def memory(self) -> list[Memory]:
        """By coordinate on pp."""
        return estimate(self.work, self.optimizer, self.device_type)


def show_mesh(path: Path, overrides: list[str], index: int, memory: str | None, console: Console) -> bool:
    """Print the mesh of one island; False when a step does not fit into `memory` (None: anything fits).

    Raises ConfigError or InputError.
    """
    config = load_config(path, overrides)
    island = island_of(config, index)
    limit = None if memory is None else parse_bytes(memory)
    plan = plan_of(config.run, island)
    work, width = plan.work, console.width
    _print(console, _title(config, index), style="bold")
    _print(console, header(config.run, plan))
    name, *lines = grids(work.degrees, width)
    _section(console, name, "\n".join(lines))
    if work.degrees.num_ranks > 1:
        which = "" if work.degrees.pp == 1 else " (of the pp ranks, the one that sends most)"
        without = ", without Muon's own exchange" if plan.optimizer == "muon" else ""
        _section(console, f"What a rank sends in a step{which}{without}", traffic_table(work, width))
    if work.degrees.pp > 1:
        _section(console, *pipeline(plan, width))
    where = "the CPU" if plan.device_type == "cpu" else "a GPU"
    _section(console, f"What a rank holds on {where}, by an estimate", memory_table(plan, width))
    if limit is None:
        return True
    fits = max(each.peak for each in plan.memory) <= limit
    console.print()
    _print(console, advice(work, plan.optimizer, limit, plan.device_type), style="bold green" if fits else "bold red")
    return fits


def parse_bytes(text: str) -> int:
    """The bytes of `80GB`, `79.6 GiB` or `500 MB`. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(
            f"--memory: got {text!r}; allowed: a number with a unit, B kB MB GB TB (powers of 1000) or "
            "KiB MiB GiB TiB (of 1024), for example 80GB"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def island_of(config: Config, index: int) -> IslandConfig:
    """The checked config of one island. Raises ConfigError."""
    count = max(1, len(config.islands))
    if index >= count:
        raise ConfigError(f"--island: got {index}; allowed: {', '.join(map(str, range(count)))}, the config's islands")
    island = config.for_island(index)
    check_island(config.run, island, f"island {index}")
    return island


def plan_of(run: RunConfig, island: IslandConfig) -> Plan:
    """What the island does in a step."""
    degrees = resolve_degrees(island.mesh, island.ranks)
    vocab_size, is_assumed = vocabulary(run)
    work = Workload(
        sizes=resolve_sizes(run.model, vocab_size),
        degrees=degrees,
        parallel=island.parallel,
        seq_len=run.data.seq_len,
        micro_batch=island.micro_batch,
        num_micro_batches=accumulation(
            run.optimizer.tokens_per_step, run.data.seq_len, island.micro_batch, degrees.num_data_ranks
        ),
        compute_itemsize=ITEMSIZES[island.compute_dtype],
    )
    return Plan(work, run.optimizer.name, "cpu" if island.device == "cpu" else "cuda", is_assumed)


def vocabulary(run: RunConfig) -> tuple[int, bool]:
    """Its size, and whether it is a guess: a tokenizer on the hub is not read, the preset's size stands in."""
    name = run.data.tokenizer
    # A file is known by a hash of its content, a tokenizer on the hub by its name.
    if name == "bytes" or tokenizer_fingerprint(name) != name:
        return vocab_size_of(run.data), False
    if run.model.vocab_size is not None:
        return run.model.vocab_size, False
    preset = PRESETS.get(run.model.preset or "")
    return preset.vocab_size if preset else BYTE_VOCAB_SIZE, True


def _title(config: Config, index: int) -> str:
    count = len(config.islands)
    others = f" (island {index} of {count}; --island N shows another)" if count > 1 else ""
    return f"{config.name}, {config.for_island(index).island}{others}"


def header(run: RunConfig, plan: Plan) -> str:
    """Model, ranks and step in a line each."""
    work, sizes, degrees = plan.work, plan.work.sizes, plan.work.degrees
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in zip(AXES, degrees.sizes, strict=True))
    lines = [
        f"model  {human_count(num_params(sizes))} parameters: {sizes.num_layers} layers, dim {sizes.dim}, "
        f"{sizes.num_heads} heads ({sizes.num_kv_heads} kv), vocabulary {sizes.vocab_size}",
        f"ranks  {degrees.num_ranks} = {mesh}",
        f"step   {run.optimizer.tokens_per_step:,} tokens = data ranks {degrees.num_data_ranks} x micro-batches "
        f"{work.num_micro_batches} x sequences {work.micro_batch} x length {work.seq_len}",
    ]
    if plan.is_vocabulary_assumed:
        lines.append(f"       (vocabulary assumed, {run.data.tokenizer!r} is not read here: set model.vocab_size)")
    return "\n".join(lines)


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style))


def _section(console: Console, name: str, content: str | Table) -> None:
    """A blank line, the name, the content."""
    console.print()
    _print(console, name, style="bold")
    console.print(Text(content) if isinstance(content, str) else content)


def pipeline(plan: Plan, width: int) -> tuple[str, str]:
    """The schedule's shape in figures; and the schedule, drawn."""
    work, simulation = plan.work, plan.simulation
    schedule, pp = work.parallel.schedule, work.degrees.pp
    name = (
        f"Pipeline: {schedule}, {len(work.stages)} stages on {pp} ranks; bubble {100 * simulation.bubble:.3g} %, "
        "if backward = 2 x forward"
    )
    *lanes, legend = draw(simulation, width).splitlines()
    drawn = [("..." if lane is None else lanes[lane]) for lane in shown(pp, MAX_DRAWN_RANKS)]
    # Under ZeRO-3 nothing stays gathered anyway.
    note = [] if schedule in SINGLE or work.frees_after_forward else [_gathered_note(len(work.stages) // pp)]
    return name, "\n".join([*drawn, legend, *note])


def _gathered_note(stages_per_rank: int) -> str:
    """What torch's runtime does with the weights of several stages."""
    if stages_per_rank <= MANAGED_STAGES:
        return (
            f"The weights of a rank's {stages_per_rank} stages stay gathered from first to last use "
            f"(torch keeps the next {MANAGED_STAGES})."
        )
    return (
        f"Of a rank's {stages_per_rank} stages torch keeps the weights of the next {MANAGED_STAGES} gathered, and "
        "gathers the others again."
    )


def memory_table(plan: Plan, width: int) -> Table:
    """Layers, micro-batches in flight and bytes of each coordinate on pp, as many as fit into `width`."""
    rows = memory_rows(plan)
    label_width = max(len(label) for label, _ in rows)
    cell_width = max(len(cell) for _, cells in rows for cell in cells)
    columns = shown(plan.work.degrees.pp, max(3, (width - label_width - GUTTER) // (cell_width + GUTTER)))
    heads = ["..." if column is None else f"pp {column}" for column in columns]
    if len(heads) == 1:
        heads = ["any rank"]
    table = plain_table(("",), tuple(heads))
    for label, cells in rows:
        table.add_row(label, *("..." if column is None else cells[column] for column in columns))
    return table


def memory_rows(plan: Plan) -> list[tuple[str, list[str]]]:
    """(what, by coordinate on pp)."""
    work, memory = plan.work, plan.memory
    rows = [("layers", [_layers(work.stages_at(pp_rank)) for pp_rank in range(work.degrees.pp)])]
    if work.degrees.pp > 1:
        rows.append(("live micro-batches", [str(live) for live in plan.simulation.peak_live]))
    return rows + [
        (name, [human_bytes(getattr(each, field)) for each in memory]) for field, name in MEMORY_ROWS.items()
    ]


def _layers(stages: Sequence[Stage]) -> str:
    """`embed 0-1` of the first stage, `14-15 head` of the last; several stages with a comma."""
    texts = []
    for stage in stages:
        layers = f"{stage.layers[0]}-{stage.layers[-1]}" if len(stage.layers) > 1 else str(stage.layers[0])
        texts.append("embed " * stage.is_first + layers + " head" * stage.is_last)
    return ", ".join(texts)
