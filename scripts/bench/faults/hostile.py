"""What attackers cost the honest islands of a run, with real processes on this machine.

    python scripts/bench/faults/hostile.py [--networks gloo,tls,hivemind] [--seconds 15]
        [--only PATTERN] [--json FILE]

Three honest islands train with a run key during an attack of tests/hostile/attacks.py. After
--seconds, the attackers are killed. The table has a line for each attack:

  rounds   rounds of the honest islands during the attack; `without` an attack in the same time
  after    rounds until all honest islands had again committed three together
  wait     longest time without a new round, up to the first one after the attack; T is its bound
  memory   growth of the peak memory of the process that grew most, and of its libp2p daemon

An attack goes on until a round is committed, for three minutes at most. Rounds have a least
duration, because each inner step takes 0.1 s. The attacks of one network follow one another in one
run, which is restarted if an island ends.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

# Otherwise the script's own folder comes first, and `outer` is a file in it, not the package.
sys.path[0] = str(Path(__file__).resolve().parents[3])

from scripts.bench.arguments import choices  # noqa: E402
from tests.hostile.attacks import ATTACKS  # noqa: E402
from tests.hostile.scene import NO_ATTACK, Attack, MiB, Outcome, Scene, scene  # noqa: E402

HEADER = (
    "attack",
    "network",
    "key",
    "rounds",
    "without",
    "after",
    "wait s",
    "T s",
    "memory MB",
    "daemon MB",
)


def play_all(
    folder: Path, network: str, attacks: list[Attack], seconds: float
) -> Iterator[Outcome | str]:
    """Yield the outcome of each attack, first of none; a text instead if something went wrong."""
    with ExitStack() as stack:
        run: Scene | None = None
        for number, attack in enumerate([NO_ATTACK, *attacks]):
            if run is None or not run.is_well:
                run = stack.enter_context(scene(folder / f"{network}-{number}", network))
            try:
                outcome = run.play(attack, seconds, least_rounds=1)
                run.assert_well()
                yield outcome
            except AssertionError as error:
                yield f"{attack.name}, {network}: {error}"
                stack.pop_all().close()
                run = None


def line_of(outcome: Outcome, usual: float) -> tuple[object, ...]:
    """Format a line of the table. `usual`: rounds per second without an attack."""
    return (
        outcome.attack,
        outcome.network,
        "yes" if outcome.has_key else "no",
        outcome.rounds_during,
        f"{usual * outcome.seconds:.0f}",
        outcome.rounds_after,
        f"{outcome.longest_wait:.1f}",
        f"{outcome.bound:.0f}",
        f"{outcome.grown / MiB:.0f}",
        f"{outcome.daemon_grown / MiB:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--networks", type=choices(("gloo", "tls", "hivemind")), default=["gloo", "tls", "hivemind"]
    )
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--only", default="", help="only attacks whose name matches this pattern")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER), flush=True)
    found: list[Outcome] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for network in args.networks:
            attacks = [a for a in ATTACKS if network in a.networks and re.search(args.only, a.name)]
            usual = 0.0
            for outcome in play_all(Path(folder), network, attacks, args.seconds):
                if isinstance(outcome, str):
                    failures.append(outcome)
                    continue
                usual = usual or outcome.rounds_during / outcome.seconds
                found.append(outcome)
                print("| " + " | ".join(map(str, line_of(outcome, usual))) + " |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in found], indent=1))
    for failure in failures:
        print(f"FAILED {failure[:3000]}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
