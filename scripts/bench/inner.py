"""Tokens a second of inner's trainer beside plain PyTorch and transformers, and of its meshes beside plain processes.

    python scripts/bench/inner.py [--steps N] [--dims 256,512] [--vocabs 260,32000] [--dtypes float32,bfloat16]
        [--what plain,ours,transformers,plain_x2,fsdp2,tp2,pp2] [--device cpu] [--split] [--json FILE]

Contestants are processes of one thread and take turns, a step each, so that a busy machine is unfair to none. A ratio
is the median over the rounds of a contestant's speed over its rival's in the same round: `plain` for one process, for
two `plain_x2`, two plain processes at once that know nothing of each other. CPU-seconds are those of all of a
contestant's processes and are not spent by waiting; wall-seconds, tokens/s here, are. All begin with the same weights
and sequences: first losses must agree, or they would not train the same model.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[2]
# Started as a file, this folder would come first, where `inner` is this file and not the package.
sys.path[0] = str(ROOT)
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

from scripts.bench.arguments import choices, whole_numbers  # noqa: E402
from scripts.bench.inner_rivals import Case, has_transformers  # noqa: E402
from scripts.bench.inner_team import PHASES, Took, team  # noqa: E402

# A fork of a parent that ran OpenMP on several threads hangs.
torch.set_num_threads(1)

RIVALS = {
    "plain": "plain",
    "ours": "plain",
    "transformers": "plain",
    "plain_x2": "plain_x2",
    "fsdp2": "plain_x2",
    "tp2": "plain_x2",
    "pp2": "plain_x2",
}
"""Whom each contestant is measured by, in the order of the table."""
NUM_PROCESSES = {"plain": 1, "plain_x2": 2}
"""Of a rival and of those that are measured by it."""
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}
"""Relative, of first losses."""


@dataclass
class Row:
    """One line of the table, its lists by round."""

    case: Case
    what: str
    first_loss: float = 0.0
    per_cpu_second: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    cpu_ratio: float | None = None
    ratio: float | None = None
    split: dict[str, float] = field(default_factory=dict)
    """CPU milliseconds of a step by phase."""

    @property
    def num_processes(self) -> int:
        return NUM_PROCESSES[RIVALS[self.what]]

    def note(self, took: Sequence[Took]) -> None:
        """Adds a round."""
        tokens = self.case.tokens
        self.per_cpu_second.append(len(took) * tokens / sum(each.cpu_seconds for each in took))
        self.per_second.append(sum(tokens / each.seconds for each in took))


def run_case(case: Case, args: argparse.Namespace) -> list[Row]:
    """A row for each contestant."""
    rows = [Row(case, what) for what in args.what]
    with ExitStack() as stack:
        teams = [stack.enter_context(team(case, row.what, row.num_processes)) for row in rows]
        pairs = list(zip(rows, teams, strict=True))
        for row, one in pairs:
            row.first_loss = mean(took.loss for took in one.ask("step"))
        for number in range(1, args.steps + 1):
            for row, one in pairs:
                row.note(one.ask("step", number))
        for row, one in pairs:
            if args.split and row.num_processes == 1:
                steps = [one.ask("split", number)[0] for number in range(args.steps)]
                row.split = {phase: 1e3 * median(step[phase] for step in steps) for phase in PHASES}
    _compare(rows)
    return rows


def _compare(rows: Sequence[Row]) -> None:
    """Fills in the ratios. Raises SystemExit when first losses say that not all train the same model."""
    by_name = {row.what: row for row in rows}
    for row in rows:
        rival = by_name.get(RIVALS[row.what])
        if rival is None:
            continue
        row.cpu_ratio = _ratio(row.per_cpu_second, rival.per_cpu_second)
        row.ratio = _ratio(row.per_second, rival.per_second)
        if abs(row.first_loss / rival.first_loss - 1) > LOSS_TOLERANCE[row.case.dtype]:
            sys.exit(f"{row.what} begins with loss {row.first_loss:.5f}, {rival.what} with {rival.first_loss:.5f}")


def _ratio(speeds: Sequence[float], of_rival: Sequence[float]) -> float:
    return median(speed / other for speed, other in zip(speeds, of_rival, strict=True))


HEADER = (
    f"{'dim':>5}{'vocab':>7}  {'dtype':<9}{'what':<13}{'tokens/CPU-s':>13}{'spread':>8}{'ratio':>7}"
    f"{'tokens/s':>10}{'spread':>8}{'ratio':>7}"
)
SPLIT_HEADER = f"{'CPU milliseconds of a step':<36}" + "".join(f"{phase:>11}" for phase in PHASES)


def line(row: Row) -> str:
    """A row as text."""
    return (
        f"{_begin(row)}{median(row.per_cpu_second):>13.0f}{_spread(row.per_cpu_second):>8.0%}{_number(row.cpu_ratio)}"
        f"{median(row.per_second):>10.0f}{_spread(row.per_second):>8.0%}{_number(row.ratio)}"
    )


def split_line(row: Row) -> str:
    """Where a row's process spends a step."""
    return _begin(row) + "".join(f"{row.split[phase]:>11.1f}" for phase in PHASES)


def _begin(row: Row) -> str:
    return f"{row.case.dim:>5}{row.case.vocab_size:>7}  {row.case.dtype:<9}{row.what:<13}"


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / median(values)


def _number(value: float | None) -> str:
    return f"{'-':>7}" if value is None else f"{value:>7.2f}"


def parse_arguments() -> argparse.Namespace:
    """The command line, its lists split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="rounds in which each contestant makes a step")
    parser.add_argument("--dims", type=whole_numbers, default=[256])
    parser.add_argument("--vocabs", type=whole_numbers, default=[260])
    parser.add_argument("--dtypes", type=choices(LOSS_TOLERANCE), default=list(LOSS_TOLERANCE))
    parser.add_argument("--what", type=choices(RIVALS), default=list(RIVALS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=8, help="of a micro-batch of one process")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step of one process")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--split", action="store_true", help="show where one process spends its time, too")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    return parser.parse_args()


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Every model of the run."""
    work = args.seq_len, args.sequences, args.micro_batches, args.device
    for dim in args.dims:
        for vocab in args.vocabs:
            for dtype in args.dtypes:
                yield Case(dim, args.layers, vocab, dtype, *work)


def drop_impossible(args: argparse.Namespace) -> None:
    """Takes from args.what, with a message, what cannot run here."""
    if "transformers" in args.what and not has_transformers():
        print("transformers is not installed, and is left out: pip install transformers")
        args.what.remove("transformers")
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        print("fewer than two GPUs: only contestants of one process are measured")
        args.what = [what for what in args.what if RIVALS[what] == "plain"]


def main() -> None:
    """Print the table."""
    args = parse_arguments()
    drop_impossible(args)
    started_at = time.monotonic()
    rows: list[Row] = []
    print(HEADER)
    for case in cases(args):
        found = run_case(case, args)
        rows += found
        print("\n".join(line(row) for row in found), flush=True)
    if args.split:
        print(SPLIT_HEADER)
        print("\n".join(split_line(row) for row in rows if row.split))
    print(f"{time.monotonic() - started_at:.0f} s in all, on {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
