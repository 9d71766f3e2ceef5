"""Prints the result of configs/experiments/noise.yaml: the spread of the last held-out loss.

    python -m scripts.noise_figures [configs/experiments/finished/noise.json]

Rows of reading order 0 vary the initial weights alone, seed 0 of each row varies the order alone,
and equal seeds vary both, as in all other experiments.
"""

import json
import sys
from pathlib import Path
from statistics import correlation, linear_regression, mean, stdev, variance

from diloco.experiments.definition.build import build_rows
from diloco.experiments.definition.schema import load_experiment
from diloco.experiments.results.comparison import compare

FOLDER = Path(__file__).resolve().parents[1] / "configs/experiments"
EXPERIMENT = FOLDER / "noise.yaml"
FINISHED = FOLDER / "finished/noise.json"
ID_LENGTH = 16
NUM_SEEDS = 8
NUM_LAST = 5
VARIED = {
    "initial weights": [(0, seed) for seed in range(NUM_SEEDS)],
    "reading order": [(seed, 0) for seed in range(NUM_SEEDS)],
    "both": [(seed, seed) for seed in range(NUM_SEEDS)],
}
"""(seed of the order, seed of the weights) of the runs that vary one, the other, or both."""

Losses = dict[tuple[int, int], list[float]]
"""Held-out losses during a run, by the seeds of its order and of its weights."""


def main(path: Path = FINISHED) -> None:
    """Print all figures, in percent of the mean last loss."""
    methods = read_losses(path)
    for name, losses in methods.items():
        spreads = {what: spread([losses[run][-1] for run in runs]) for what, runs in VARIED.items()}
        print(name, ", ".join(f"{what} {value:.2f} %" for what, value in spreads.items()))
        ends = [losses[run][-NUM_LAST:] for run in VARIED["both"]]
        print(
            f"  scatter of the last {NUM_LAST} {mean(map(scatter, ends)):.2f} %, spread of their "
            "means",
            end=" ",
        )
        print(f"{spread([mean(end) for end in ends]):.2f} %")
    for what, runs in VARIED.items():
        print_gap(what, *([losses[run][-1] for run in runs] for losses in methods.values()))


def read_losses(path: Path) -> dict[str, Losses]:
    """Return the losses of the finished runs, by method."""
    by_id = {name[-ID_LENGTH:]: run for name, run in json.loads(path.read_text()).items()}
    found: dict[str, Losses] = {"data-parallel": {}, "DiLoCo": {}}
    for row in build_rows(load_experiment(EXPERIMENT)).rows:
        losses = found["data-parallel" if row.is_data_parallel else "DiLoCo"]
        for run in (row.run(seed) for seed in row.seeds):
            losses[row.config.order_seed or 0, run.seed] = [
                loss for _, loss in by_id[run.run_id]["curve"]
            ]
    return found


def spread(values: list[float]) -> float:
    """Return the standard deviation in percent of the mean."""
    return 100 * stdev(values) / mean(values)


def scatter(values: list[float]) -> float:
    """Return the standard deviation around the line through the values.

    It is in percent of their mean.
    """
    places = range(len(values))
    line = linear_regression(places, values)
    squares = [
        (y - line.slope * x - line.intercept) ** 2 for x, y in zip(places, values, strict=True)
    ]
    return 100 * (sum(squares) / (len(values) - 2)) ** 0.5 / mean(values)


def print_gap(what: str, plain: list[float], diloco: list[float]) -> None:
    """Print the gap of paired runs, its spread, and what the spread would be without pairs."""
    gap = compare(dict(enumerate(diloco)), dict(enumerate(plain)))
    assert gap is not None and gap.half_width is not None, "eight pairs"
    low = gap.mean - gap.half_width
    high = gap.mean + gap.half_width
    of_pairs = 100 * stdev(ours / theirs for ours, theirs in zip(diloco, plain, strict=True))
    alone = 100 * (variance(plain) + variance(diloco)) ** 0.5 / mean(plain)
    print(
        f"gap, by {what}: {100 * gap.mean:+.2f} % [{100 * low:+.2f}, {100 * high:+.2f}],", end=" "
    )
    print(
        f"spread {of_pairs:.2f} %, without pairs {alone:.2f} %, correlation "
        f"{correlation(plain, diloco):.2f}"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
