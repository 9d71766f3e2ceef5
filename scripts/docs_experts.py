"""The table of docs/experts.md: what Qwen3-30B-A3B sends between islands, and how much time that
leaves, from the planner.
"""

from collections.abc import Iterator
from itertools import product

from diloco.config.schema import parse_config
from diloco.formatting import human_bytes, human_duration, percent
from diloco.planning.mesh.gpus import find_gpu
from diloco.planning.mesh.seconds import compute_seconds
from diloco.planning.mesh.step_plan import build_step_plan, load_island
from diloco.planning.predict import Case, LinkSpeed, Prediction, predict
from inner.measure.param_specs import averaged_specs
from outer.cost import HostSpeed

ISLANDS = (2, 4, 8)
GIGABITS = (1, 10)
RTT_SECONDS = 0.05
CHOICES = {
    "bf16": (),
    "int8": ("outer.codec=int8",),
    "int8, experts int4": ("outer.codec=int8", "outer.experts.codec=int4"),
    "int8, experts int4 in every 4th round": (
        "outer.codec=int8",
        "outer.experts.codec=int4",
        "outer.experts.every=4",
    ),
}
"""What is set, beside RUN."""
RUN = """
model: {preset: qwen3-30b-a3b, vocab_size: 151936}
optimizer: {tokens_per_step: 4194304}
data: {seq_len: 4096}
outer: {inner_steps: 100, rounds: 100, codec: bf16, transport: tls}
island: {ranks: 64, mesh: {ep: 8}, micro_batch: 1, compute_dtype: bfloat16}
"""
NO_HOST = HostSpeed(
    encode=0.0, decode=0.0, merge=0.0, snapshot=0.0, step=0.0, write=0.0, digest=0.0
)
"""The table leaves out the host's work, which differs from machine to machine."""


def predict_cycle(num_islands: int, gigabits: int, overrides: tuple[str, ...]) -> Prediction:
    """Return the prediction of a cycle of islands of 64 H100."""
    config = parse_config(RUN, [*overrides, f"outer.start_islands={num_islands}"])
    island = build_step_plan(config.run, load_island(config, 0))
    case = Case(
        outer=config.outer,
        specs=averaged_specs(island.work.sizes),
        num_islands=num_islands,
        step_seconds=compute_seconds(
            island.work, config.optimizer.tokens_per_step, find_gpu("h100").flops
        ),
        link=LinkSpeed(gigabits * 1e9, RTT_SECONDS),
        speed=NO_HOST,
        ranks=island.work.degrees.num_ranks,
    )
    return predict(case)


def sharing_table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| codec | islands | sent per round | at 1 Gbit/s | computes | at 10 Gbit/s | computes |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {' | '.join(_cells(name, number))} |" for name, number in product(CHOICES, ISLANDS)
    ]
    return "\n".join(lines)


def _cells(name: str, num_islands: int) -> Iterator[str]:
    found = [predict_cycle(num_islands, gigabits, CHOICES[name]) for gigabits in GIGABITS]
    yield name
    yield str(num_islands)
    yield human_bytes(found[0].sent_bytes)
    for prediction in found:
        yield human_duration(prediction.total_seconds - prediction.compute_seconds)
        yield percent(prediction.utilisation)
