"""A run under a storm of faults, checked for one history, every data unit trained once, and an
unchanged loss.

    python -m scripts.bench.faults.soak [--rounds 170] [--islands 4] [--storm 3] [--seed 0]
        [section.key=value ...]

Islands of a 1M model are killed, frozen and restarted throughout the run (about ten minutes on two
cores). Afterwards a run without faults is trained for the loss to compare with. It has the same
length and as many islands as trained in the storm on average, rounded down, because absent islands
train nothing. Exits with status 1 unless every check holds.
"""

import argparse
import sys
from typing import Any, NamedTuple

from scripts.bench.simulation import run_simulation

INNER_STEPS = 5
SMALL = [
    "model.preset=1m",
    f"outer.inner_steps={INNER_STEPS}",
    "optimizer.tokens_per_step=1024",
    "island.micro_batch=2",
    "evaluate.every_rounds=10",
]
MAX_LOSS_RATIO = 1.02
MIN_COMMITTED_SHARE = 0.9
MIN_FAULTS = 10


class Check(NamedTuple):
    """A requirement, whether it holds, and the figure that shows it."""

    what: str
    holds: bool
    found: str


def main() -> None:
    """Run both simulations and print the checks."""
    args = _arguments()
    run = [
        "configs/quickstart.yaml",
        "--ranks",
        "1",
        f"outer.rounds={args.rounds}",
        *SMALL,
        *args.overrides,
    ]
    storm = ["--storm", str(args.storm), "--storm-seed", str(args.seed)]
    stormy = run_simulation([*run, "--islands", str(args.islands), *storm])
    if stormy is None:
        sys.exit("the run with faults did not finish")
    present = stormy["steps_accounted"] // (args.rounds * INNER_STEPS)
    calm = run_simulation([*run, "--islands", str(max(present, 1))])
    if calm is None:
        sys.exit("the run without faults did not finish")
    checks = build_checks(stormy, calm, args.rounds)
    for check in checks:
        print(f"{'ok  ' if check.holds else 'FAIL'}  {check.what:<62} {check.found}")
    sys.exit(not all(check.holds for check in checks))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=170)
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument(
        "--storm", type=float, default=3.0, help="mean number of faults per island and minute"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the storm")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_args()


def build_checks(stormy: dict[str, Any], calm: dict[str, Any], rounds: int) -> list[Check]:
    """Build the checks from the summaries of the run with faults and of the run without."""
    num_faults = sum(stormy["faults"].values())
    ratio = stormy["final_eval_loss"] / calm["final_eval_loss"]
    # A unit has no record if an island was killed between a commit and its record.
    num_unrecorded = stormy["units_trained"] - stormy["steps_accounted"]
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(stormy["faults"].items()))
    return [
        Check(
            f"at least {MIN_FAULTS} faults were inflicted",
            num_faults >= MIN_FAULTS,
            kinds or "none",
        ),
        Check(
            "all rounds are committed",
            stormy["rounds_committed"] == rounds,
            str(stormy["rounds_committed"]),
        ),
        Check(
            "digests are equal in every round",
            stormy["digests_equal"],
            str(stormy["rounds_disagreeing"] or "yes"),
        ),
        Check(
            "no unit of text was trained twice",
            stormy["units_repeated"] == 0,
            str(stormy["units_repeated"]),
        ),
        Check(
            "every inner step of these rounds trained its unit",
            0 <= num_unrecorded <= stormy["faults"].get("kill", 0) * INNER_STEPS,
            f"{stormy['units_trained']} units, {stormy['steps_accounted']} steps",
        ),
        Check(
            f"inner steps in committed rounds: at least {MIN_COMMITTED_SHARE:.0%}",
            stormy["committed_share"] >= MIN_COMMITTED_SHARE,
            f"{stormy['committed_share']:.1%}",
        ),
        Check(
            f"held-out loss at most {MAX_LOSS_RATIO} x that of {calm['num_islands']} islands "
            "without faults",
            ratio <= MAX_LOSS_RATIO,
            f"{stormy['final_eval_loss']:.4f} / {calm['final_eval_loss']:.4f} = {ratio:.4f}",
        ),
    ]


if __name__ == "__main__":
    main()
