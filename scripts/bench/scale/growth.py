"""How a run grows, on paper: memory, bytes and seconds of a round by model, ranks of an island and
number of islands.

    python -m scripts.bench.scale.growth [--bandwidth 10gbit] [--rtt 50ms]
        [section.key=value of the outer config ...]

Nothing is started. "device" is the fullest rank's peak as `diloco mesh` plans it (bf16, AdamW, two
micro-batches of one sequence of 8192, full recomputation), "host" the outer loop's memory of a rank
as in `diloco plan`, without the process itself. A round's seconds are the terms of `diloco plan`:
the transfer over one link of this bandwidth for each island; coding beyond it; outer step and
digests; copies; round trips and the host's time for each payload. Coding, steps and copies are
measured on one core of this machine, and each rank is taken to have one such core. "carriers" is
the list of carriers in each ready message at its longest.
"""

import argparse
import json
from dataclasses import dataclass

from diloco.formatting import human_bytes, human_count, parse_bits_per_second, parse_seconds
from diloco.planning.predict import Case, LinkSpeed, Prediction, predict
from inner.config import ParallelConfig
from inner.measure.memory import estimate_memory
from inner.measure.param_specs import num_elements, param_specs
from inner.measure.workload import Workload
from inner.mesh import Degrees
from inner.model.sizes import PRESETS
from outer.codecs.choice import build_space
from outer.config import OuterConfig
from outer.cost import measure_host_speed, memory_bytes
from outer.network.messages import pack_carriers

SEQ_LEN = 8192
STEP_SECONDS = 1.0
"""Duration of an inner step. No term of a round without a delay depends on it."""
ISLANDS = (2, 8, 64)
COLUMNS = (
    "model",
    "ranks",
    "mesh",
    "device",
    "islands",
    "host",
    "parts",
    "carriers",
    "sent a round",
    "transfer, coding, step, copies, messages (s)",
)


@dataclass(frozen=True)
class Size:
    """A model and the mesh of each island that trains it."""

    preset: str
    degrees: Degrees


SIZES = (
    Size("150m", Degrees()),
    Size("1b", Degrees(dp_shard=8)),
    Size("8b", Degrees(dp_shard=8)),
    Size("8b", Degrees(dp_replicate=8, dp_shard=8)),
    Size("70b", Degrees(pp=2, dp_shard=4, tp=8)),
    Size("70b", Degrees(pp=4, dp_shard=16, tp=8)),
    Size("405b", Degrees(pp=8, dp_shard=16, tp=8)),
)


def main() -> None:
    options = parse_arguments()
    link = LinkSpeed(parse_bits_per_second(options.bandwidth), parse_seconds(options.rtt))
    outer = OuterConfig.model_validate(
        dict(text.split("=", 1) for text in options.overrides) | {"inner_steps": 100}
    )
    print(
        f"links of {options.bandwidth} and {options.rtt} for each island, {outer.codec} over "
        f"{outer.transport}"
    )
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for size in SIZES:
        for num_islands in ISLANDS:
            print("| " + " | ".join(row(size, num_islands, outer, link)) + " |", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bandwidth", default="10gbit", help="bandwidth of each island's link; default: 10gbit"
    )
    parser.add_argument("--rtt", default="50ms", help="round trip between islands; default: 50ms")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings of the outer config, for example codec=int4",
    )
    return parser.parse_args()


def row(size: Size, num_islands: int, outer: OuterConfig, link: LinkSpeed) -> list[str]:
    """Return the cells of one row."""
    outer = outer.model_copy(update={"start_islands": num_islands})
    degrees = size.degrees
    specs = param_specs(PRESETS[size.preset])
    num_parts = len(build_space(specs, outer).parts)
    case = Case(
        outer=outer,
        specs=tuple(specs),
        num_islands=num_islands,
        step_seconds=STEP_SECONDS,
        link=link,
        speed=measure_host_speed(outer),
        ranks=degrees.num_ranks,
    )
    predicted = predict(case)
    host = sum(memory_bytes(outer, case.specs, num_islands, degrees.num_ranks).values())
    return [
        f"{size.preset} ({human_count(num_elements(specs))})",
        str(degrees.num_ranks),
        describe(degrees),
        human_bytes(device_bytes(size)),
        str(num_islands),
        human_bytes(host),
        str(num_parts),
        human_bytes(longest_carriers(num_parts, degrees.num_ranks)),
        human_bytes(predicted.sent_bytes),
        terms(predicted),
    ]


def describe(degrees: Degrees) -> str:
    """Describe the axes of a mesh that have several ranks."""
    axes = {
        "pp": degrees.pp,
        "dp_replicate": degrees.dp_replicate,
        "dp_shard": degrees.dp_shard,
        "tp": degrees.tp,
    }
    return " ".join(f"{axis} {ranks}" for axis, ranks in axes.items() if ranks > 1) or "one"


def device_bytes(size: Size) -> int:
    """Return the planned peak of an inner step on the fullest rank, in bytes."""
    work = Workload(
        sizes=PRESETS[size.preset],
        degrees=size.degrees,
        parallel=ParallelConfig.model_validate({"recompute": "full"}),
        seq_len=SEQ_LEN,
        micro_batch=1,
        num_micro_batches=2 * size.degrees.pp,
        compute_itemsize=2,
    )
    return max(each.peak for each in estimate_memory(work, "adamw"))


def longest_carriers(num_parts: int, num_ranks: int) -> int:
    """Return the bytes of the carriers as JSON, if neighbouring parts have different carriers."""
    return len(
        json.dumps(
            pack_carriers([part % num_ranks for part in range(num_parts)]), separators=(",", ":")
        )
    )


def terms(predicted: Prediction) -> str:
    """Return the seconds of a round by term, as text."""
    seconds = (
        predicted.transfer_seconds,
        predicted.codec_seconds,
        predicted.step_seconds,
        predicted.copy_seconds,
        predicted.trip_seconds,
    )
    return ", ".join(f"{each:.1f}" if each < 100 else f"{each:.0f}" for each in seconds)


if __name__ == "__main__":
    main()
