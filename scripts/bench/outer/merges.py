"""The cost of each merge rule relative to the plain mean, and its effect on the loss.

    python -m scripts.bench.outer.merges [--parts 8] [--elements 262144] [--repeat N]
    python -m scripts.bench.outer.merges --quality [--islands 8] [--rounds 12] [--rules mean,radial]
        [section.key=value ...]

The first form prints the time of one part on one thread, and its ratio to the mean's. The second
form trains the quickstart config with each rule, once with honest islands and once with an island
that poisons every round (`diloco simulate --fault poison:1@round=1` multiplies its pseudo-gradient
by -10), and prints the held-out losses.
"""

import argparse
import time
from collections.abc import Callable
from typing import get_args

import torch

from outer.config import MergeConfig
from outer.merges import build_merge
from outer.reduce.filters import find_outliers
from scripts.bench.arguments import choices
from scripts.bench.simulation import run_simulation

RULES: tuple[str, ...] = get_args(MergeConfig.model_fields["rule"].annotation)
FAULTS = {"honest": [], "one poisons": ["--fault", "poison:1@round=1"]}
QUICK = [
    "outer.transport=gloo",
    "outer.codec=int8",
    "optimizer.tokens_per_step=1024",
    "island.micro_batch=4",
]
"""Settings for eight islands on a small machine, each with an eighth of the quickstart's tokens."""


def main() -> None:
    """Print the requested table."""
    args = _arguments()
    if args.quality:
        _print_quality(
            args.rules, args.islands, [*QUICK, f"outer.rounds={args.rounds}", *args.overrides]
        )
    else:
        torch.set_num_threads(1)
        _print_costs(args.rules, args.parts, args.elements, args.repeat)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rules", type=choices(RULES), default=list(RULES), help="comma-separated")
    parser.add_argument(
        "--parts", type=int, default=8, help="number of participants whose parts are merged"
    )
    parser.add_argument("--elements", type=int, default=262144, help="number of elements of a part")
    parser.add_argument(
        "--repeat", type=int, default=30, help="number of measurements of each rule"
    )
    parser.add_argument(
        "--quality", action="store_true", help="train, and print held-out losses instead of times"
    )
    parser.add_argument(
        "--islands", type=int, default=8, help="number of islands, of one process each"
    )
    parser.add_argument("--rounds", type=int, default=12, help="number of rounds of each training")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings of the config that is trained",
    )
    return parser.parse_args()


def _print_costs(rules: list[str], num_parts: int, num_elements: int, repeat: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(num_elements, generator=generator) for _ in range(num_parts)]
    last = torch.stack(parts).mean(0)
    weights = [1 / num_parts] * num_parts
    actions: dict[str, Callable[[], object]] = {}
    for rule in ["mean", *(rule for rule in rules if rule != "mean")]:
        merge = build_merge(MergeConfig.model_validate({"rule": rule}))
        actions[rule] = lambda merge=merge: merge(parts, weights, last)
    actions["centered_clip, first"] = lambda: build_merge(MergeConfig(rule="centered_clip"))(
        parts, weights, None
    )
    norms = MergeConfig(max_norm_ratio=5)
    cosines = MergeConfig(min_cosine=0)
    actions["filter max_norm_ratio"] = lambda: find_outliers(parts, weights, last, norms)
    actions["filter min_cosine"] = lambda: find_outliers(parts, weights, last, cosines)
    seconds = _least_seconds(actions, repeat)
    print(
        f"{num_parts} x {num_elements} elements, least of {repeat}; torch {torch.__version__}, 1 "
        "thread"
    )
    print(f"{'what':<22}{'ms':>8}{'x mean':>9}")
    for name, measured in seconds.items():
        print(f"{name:<22}{measured * 1e3:>8.2f}{measured / seconds['mean']:>9.2f}")


def _least_seconds(actions: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Return the shortest time of each action, which other load affects least.

    The actions take turns.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeat):
        for name, action in actions.items():
            started_at = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - started_at)
    return {name: min(measured) for name, measured in seconds.items()}


def _print_quality(rules: list[str], num_islands: int, overrides: list[str]) -> None:
    print(f"held-out loss of quickstart with {num_islands} islands, {' '.join(overrides)}")
    print(f"{'rule':<18}" + "".join(f"{name:>14}" for name in FAULTS), flush=True)
    for rule in rules:
        losses = [_train(rule, num_islands, overrides, fault) for fault in FAULTS.values()]
        print(f"{rule:<18}" + "".join(f"{loss:>14}" for loss in losses), flush=True)


def _train(rule: str, num_islands: int, overrides: list[str], fault: list[str]) -> str:
    """Train one run and return its held-out loss as text, or `failed` or `diverged`."""
    settings = ["configs/quickstart.yaml", *overrides, f"outer.merge.rule={rule}"]
    summary = run_simulation([*settings, "--islands", str(num_islands), "--ranks", "1", *fault])
    if summary is None:
        return "failed"
    loss = summary["final_eval_loss"]
    return "diverged" if loss is None else f"{loss:.4f}"


if __name__ == "__main__":
    main()
