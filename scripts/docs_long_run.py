"""The table of docs/long-run.md: what models of several sizes weigh on two islands of 32 GPUs, from
the planner.
"""

from dataclasses import dataclass

from diloco.config.schema import Config, parse_config
from diloco.formatting import human_bytes, human_count, human_duration
from diloco.planning.mesh.host_memory import estimate_host_memory
from diloco.planning.state_times import count_state_bytes
from inner.measure.param_specs import num_elements, param_specs
from inner.model.sizes import resolve_sizes
from outer.cost import round_bytes

MODELS = {"1b": 128_256, "8b": 128_256, "70b": 128_256, "qwen3-30b-a3b": 151_936}
"""Presets, each with its vocabulary."""
NUM_ISLANDS = 2
NODE_GPUS = 8
GIGABIT = 1e9 / 8
"""Bytes per second of a link of 1 Gbit/s."""
DISK = 1e9
"""Bytes per second of an island's disk."""
RUN = """
model: {{preset: {preset}}}
optimizer: {{tokens_per_step: 4194304}}
data: {{seq_len: 4096}}
outer: {{inner_steps: 100, codec: int8, transport: tls, start_islands: 2,
  optimizer: {{lr: 0.7, momentum: 0.9}}}}
island: {{ranks: 32, micro_batch: 1, compute_dtype: bfloat16}}
islands: [{{}}, {{}}]
"""


@dataclass(frozen=True)
class Weight:
    """What a model weighs in bytes."""

    num_params: int
    checkpoint: float
    node_least: float
    """Host memory that a node of 8 GPUs cannot do without."""
    node_estimate: float
    sent: float
    """What an island sends per round."""
    joined: float


def weigh(preset: str) -> Weight:
    """Return what the run with this preset weighs."""
    config: Config = parse_config(RUN.format(preset=preset))
    specs = param_specs(resolve_sizes(config.model, MODELS[preset]))
    state = count_state_bytes(config.run, specs, NUM_ISLANDS)
    host = estimate_host_memory(config.run, config.for_island(0), "cuda", specs, NUM_ISLANDS)
    (of_a_round,) = round_bytes(config.outer, tuple(specs), NUM_ISLANDS)
    return Weight(
        num_params=num_elements(specs),
        checkpoint=state.saved,
        node_least=NODE_GPUS * host.least,
        node_estimate=NODE_GPUS * host.estimate,
        sent=of_a_round.sent_bytes,
        joined=state.joined,
    )


def weight_table() -> str:
    """Return the table in Markdown."""
    heads = (
        "model",
        "parameters",
        "checkpoint",
        "save or read it",
        "host memory of a node",
        "sent per round",
        "at 1 Gbit/s",
        "at 10 Gbit/s",
        "to join",
        "at 1 Gbit/s",
        "at 10 Gbit/s",
    )
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += [f"| {' | '.join(_cells(preset, weigh(preset)))} |" for preset in MODELS]
    return "\n".join(lines)


def _cells(preset: str, weight: Weight) -> list[str]:
    return [
        preset,
        human_count(weight.num_params),
        human_bytes(weight.checkpoint),
        human_duration(weight.checkpoint / DISK),
        f"{human_bytes(weight.node_least)} to {human_bytes(weight.node_estimate)}",
        human_bytes(weight.sent),
        human_duration(weight.sent / GIGABIT),
        human_duration(weight.sent / (10 * GIGABIT)),
        human_bytes(weight.joined),
        human_duration(weight.joined / GIGABIT),
        human_duration(weight.joined / (10 * GIGABIT)),
    ]
