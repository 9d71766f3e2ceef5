"""Tokens per second of inner's trainer relative to plain PyTorch and transformers, on one process
and on meshes.

    python scripts/bench/inner/inner.py [--steps N] [--dims 256,512] [--vocabs 260,32000]
        [--dtypes float32,bfloat16]
        [--what plain,ours,transformers,plain_x2,ddp2,dp2,dp2_fsdp,fsdp2,tp2,tp2_split,pp2,cp2,
        cp2_fsdp]
        [--device cpu] [--split] [--json FILE]

Contestants are processes with one thread each. They take turns, one step each, so that a busy
machine affects all of them alike. A ratio is the median over all rounds of a contestant's speed
relative to its rival's in the same round. The rival is `plain` for one process and `plain_x2`, two
independent plain processes at once, for two. tokens/CPU-s counts the CPU time of all of a
contestant's processes, which excludes waiting; tokens/s counts wall time. All contestants begin
with the same weights and sequences, so their first losses must agree.

`ddp2` is the plain loop in torch's DistributedDataParallel. `dp2_fsdp` and `cp2_fsdp` are dp2 and
cp2 with FSDP (zero: 3) in place of whole weights (zero: 0), `tp2_split` is tp2 with sequence
parallelism. A second table compares the pairs of them that took part, also round by round: the
median, and the lowest and highest ratio.
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

ROOT = Path(__file__).resolve().parents[3]
# Otherwise the script's own folder comes first, and `inner` is a file in it, not the package.
sys.path[0] = str(ROOT)
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

from scripts.bench.arguments import choices, whole_numbers  # noqa: E402
from scripts.bench.inner.inner_rivals import ModelCase, has_transformers  # noqa: E402
from scripts.bench.inner.inner_team import PHASES, StepCost, start_processes  # noqa: E402

# A fork hangs if its parent has run OpenMP on several threads.
torch.set_num_threads(1)

RIVALS = {
    "plain": "plain",
    "ours": "plain",
    "transformers": "plain",
    "plain_x2": "plain_x2",
    "ddp2": "plain_x2",
    "dp2": "plain_x2",
    "dp2_fsdp": "plain_x2",
    "fsdp2": "plain_x2",
    "tp2": "plain_x2",
    "tp2_split": "plain_x2",
    "pp2": "plain_x2",
    "cp2": "plain_x2",
    "cp2_fsdp": "plain_x2",
}
"""The rival that each contestant is compared with, in the order of the table."""
PAIRS = (("dp2", "ddp2"), ("dp2", "dp2_fsdp"), ("cp2", "cp2_fsdp"), ("tp2", "tp2_split"))
"""Contestants that are compared with each other in the second table."""
NUM_PROCESSES = {"plain": 1, "plain_x2": 2}
"""Number of processes of each rival and of the contestants compared with it."""
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}
"""Largest relative difference of first losses, by dtype."""


@dataclass
class ContestantRow:
    """One row of the table. Its lists hold one value per round."""

    case: ModelCase
    what: str
    first_loss: float = 0.0
    per_cpu_second: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    cpu_ratio: float | None = None
    ratio: float | None = None
    split: dict[str, float] = field(default_factory=dict)
    """CPU milliseconds of a step, by phase."""

    @property
    def num_processes(self) -> int:
        return NUM_PROCESSES[RIVALS[self.what]]

    def add_round(self, costs: Sequence[StepCost]) -> None:
        """Add the costs of one step of each process."""
        tokens = self.case.tokens
        self.per_cpu_second.append(len(costs) * tokens / sum(cost.cpu_seconds for cost in costs))
        self.per_second.append(sum(tokens / cost.seconds for cost in costs))


def run_case(case: ModelCase, args: argparse.Namespace) -> list[ContestantRow]:
    """Measure all contestants on one model and return a row for each."""
    rows = [ContestantRow(case, what) for what in args.what]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(start_processes(case, row.what, row.num_processes)) for row in rows
        ]
        pairs = list(zip(rows, processes, strict=True))
        for row, contestant in pairs:
            row.first_loss = mean(cost.loss for cost in contestant.ask("step"))
        for number in range(1, args.steps + 1):
            for row, contestant in pairs:
                row.add_round(contestant.ask("step", number))
        for row, contestant in pairs:
            if args.split and row.num_processes == 1:
                steps = [contestant.ask("split", number)[0] for number in range(args.steps)]
                row.split = {phase: 1e3 * median(step[phase] for step in steps) for phase in PHASES}
    _fill_in_ratios(rows)
    return rows


def _fill_in_ratios(rows: Sequence[ContestantRow]) -> None:
    """Compute the ratios. Raises SystemExit when first losses differ, because then the models
    differ.
    """
    by_name = {row.what: row for row in rows}
    for row in rows:
        rival = by_name.get(RIVALS[row.what])
        if rival is None:
            continue
        row.cpu_ratio = _ratio(row.per_cpu_second, rival.per_cpu_second)
        row.ratio = _ratio(row.per_second, rival.per_second)
        if abs(row.first_loss / rival.first_loss - 1) > LOSS_TOLERANCE[row.case.dtype]:
            sys.exit(
                f"{row.what} begins with loss {row.first_loss:.5f}, {rival.what} with "
                f"{rival.first_loss:.5f}"
            )


def _ratio(speeds: Sequence[float], of_rival: Sequence[float]) -> float:
    return median(_ratios(speeds, of_rival))


def _ratios(speeds: Sequence[float], of_rival: Sequence[float]) -> list[float]:
    return [speed / other for speed, other in zip(speeds, of_rival, strict=True)]


HEADER = (
    f"{'dim':>5}{'vocab':>7}  {'dtype':<9}{'what':<13}{'tokens/CPU-s':>13}{'spread':>8}{'ratio':>7}"
    f"{'tokens/s':>10}{'spread':>8}{'ratio':>7}"
)
PAIR_HEADER = f"{'pairs, by round':<49}{'ratio by CPU':>24}{'ratio by time':>24}"
SPLIT_HEADER = f"{'CPU milliseconds of a step':<36}" + "".join(f"{phase:>11}" for phase in PHASES)


def format_row(row: ContestantRow) -> str:
    """Format a row as text."""
    return (
        f"{_row_start(row)}{median(row.per_cpu_second):>13.0f}{_spread(row.per_cpu_second):>8.0%}{_number(row.cpu_ratio)}"
        f"{median(row.per_second):>10.0f}{_spread(row.per_second):>8.0%}{_number(row.ratio)}"
    )


def format_split(row: ContestantRow) -> str:
    """Format the CPU time of a row's process by phase."""
    return _row_start(row) + "".join(f"{row.split[phase]:>11.1f}" for phase in PHASES)


def format_pair(row: ContestantRow, other: ContestantRow) -> str:
    """Format the ratios of two rows, round by round, as text."""
    by_cpu = _ratios(row.per_cpu_second, other.per_cpu_second)
    by_time = _ratios(row.per_second, other.per_second)
    texts = [
        f"{median(each):>7.2f} ({min(each):.2f} to {max(each):.2f})" for each in (by_cpu, by_time)
    ]
    return f"{_row_start(row)}/ {other.what:<11}" + "".join(f"{text:>24}" for text in texts)


def compared_pairs(rows: Sequence[ContestantRow]) -> list[tuple[ContestantRow, ContestantRow]]:
    """Return the rows of each of PAIRS that have the same model."""
    by_name = {(row.case, row.what): row for row in rows}
    cases = dict.fromkeys(row.case for row in rows)
    pairs = [((case, one), (case, other)) for case in cases for one, other in PAIRS]
    return [
        (by_name[one], by_name[other])
        for one, other in pairs
        if one in by_name and other in by_name
    ]


def _row_start(row: ContestantRow) -> str:
    return f"{row.case.dim:>5}{row.case.vocab_size:>7}  {row.case.dtype:<9}{row.what:<13}"


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / median(values)


def _number(value: float | None) -> str:
    return f"{'-':>7}" if value is None else f"{value:>7.2f}"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="number of rounds; each contestant makes one step per round",
    )
    parser.add_argument("--dims", type=whole_numbers, default=[256])
    parser.add_argument("--vocabs", type=whole_numbers, default=[260])
    parser.add_argument("--dtypes", type=choices(LOSS_TOLERANCE), default=list(LOSS_TOLERANCE))
    parser.add_argument("--what", type=choices(RIVALS), default=list(RIVALS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument(
        "--sequences", type=int, default=8, help="sequences in a micro-batch of one process"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="micro-batches in a step of one process"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--split", action="store_true", help="also show where one process spends its time"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def build_cases(args: argparse.Namespace) -> Iterator[ModelCase]:
    """Yield every model to measure."""
    work = args.seq_len, args.sequences, args.micro_batches, args.device
    for dim in args.dims:
        for vocab in args.vocabs:
            for dtype in args.dtypes:
                yield ModelCase(dim, args.layers, vocab, dtype, *work)


def drop_impossible(args: argparse.Namespace) -> None:
    """Remove contestants that cannot run on this machine from args.what, with a message."""
    if "transformers" in args.what and not has_transformers():
        print("transformers is not installed and is skipped: pip install transformers")
        args.what.remove("transformers")
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        print("there are fewer than two GPUs: only contestants with one process are measured")
        args.what = [what for what in args.what if RIVALS[what] == "plain"]


def main() -> None:
    """Print the table."""
    args = parse_arguments()
    drop_impossible(args)
    started_at = time.monotonic()
    rows: list[ContestantRow] = []
    print(HEADER)
    for case in build_cases(args):
        found = run_case(case, args)
        rows += found
        print("\n".join(format_row(row) for row in found), flush=True)
    pairs = compared_pairs(rows)
    if pairs:
        print(PAIR_HEADER)
        print("\n".join(format_pair(*pair) for pair in pairs))
    if args.split:
        print(SPLIT_HEADER)
        print("\n".join(format_split(row) for row in rows if row.split))
    print(
        f"{time.monotonic() - started_at:.0f} s in all, on {os.cpu_count()} cores; load "
        f"{os.getloadavg()[0]:.1f}"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
