"""Speed of each codec beside a plain clone of the same part, on one thread.

    python -m scripts.bench.codecs [--elements N] [--repeat N]

GB/s counts bytes of fp32 values, whichever side they are on; x is that time over the clone's.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from outer.codecs import build_codec
from outer.digest import part_digest
from outer.merges.mean import WeightedSum

CODECS = ("fp32", "bf16", "fp16", "int8")


def main() -> None:
    """Print the table."""
    args = _arguments()
    torch.set_num_threads(1)
    values = torch.randn(args.elements, generator=torch.Generator().manual_seed(0)) * 1e-3
    actions = _actions(values)
    seconds = _median_seconds(actions, args.repeat)
    print(f"{args.elements} elements, {args.repeat} repeats, median; torch {torch.__version__}, 1 thread")
    print(f"{'what':<14}{'bytes/element':>14}{'us':>10}{'GB/s':>8}{'x clone':>9}")
    for name in actions:
        codec = name.split()[0]
        size = build_codec(codec).num_bytes(args.elements) / args.elements if codec in CODECS else 4.0
        gigabytes = values.nbytes / seconds[name] / 1e9
        ratio = seconds[name] / seconds["clone"]
        print(f"{name:<14}{size:>14.4f}{seconds[name] * 1e6:>10.1f}{gigabytes:>8.2f}{ratio:>9.2f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=262144, help="elements of the part")
    parser.add_argument("--repeat", type=int, default=200, help="measurements of each action")
    return parser.parse_args()


def _actions(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is measured, by the name it is printed under."""
    actions: dict[str, Callable[[], object]] = {"clone": values.clone}
    for name in CODECS:
        codec = build_codec(name)
        payload = codec.encode(values)
        actions[f"{name} encode"] = lambda codec=codec: codec.encode(values)
        actions[f"{name} decode"] = lambda codec=codec, payload=payload: codec.decode(payload, values.numel())
    total = WeightedSum(values.numel())
    actions["merge add"] = lambda: total.add(values, 0.5)
    actions["digest"] = lambda: part_digest(values)
    return actions


def _median_seconds(actions: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Median time of each action; they take turns, so that a busy machine is unfair to none."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeat):
        for name, action in actions.items():
            action()  # warm: the others have just emptied the caches
            started_at = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - started_at)
    return {name: median(measured) for name, measured in seconds.items()}


if __name__ == "__main__":
    main()
