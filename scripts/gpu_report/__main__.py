"""What the trainer does on this machine's GPUs: a report as text, and as JSON.

    python -m scripts.gpu_report [--device cuda|cpu] [--only speed-1b,step] [--minutes 10]
        [--no-compile] [--json FILE]

It takes eight minutes on one GPU. Each section is a process of its own with a time limit
(scripts/gpu_report/sections.py lists them), so that a crash or a hang is a line of the report and
the other sections still run. A section reports row by row, and the rows before a failure are kept.
`--device cpu` runs the same code at tiny sizes, without a GPU. The exit status is 0 if every
section ended and no comparison failed.
"""

import argparse
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from scripts.gpu_report.place import Place
from scripts.gpu_report.sections import (
    SECTIONS,
    SectionReport,
    find_obstacle,
    load_section,
    run_apart,
)

SLACK_SECONDS = 5.0
"""Least remaining time in which a section is still started."""


def main() -> int:
    args = parse_arguments()
    place = Place(args.device, args.compile)
    if args.section:
        run_here(args.section, place)
    if place.num_devices == 0:
        print(
            "error: torch finds no CUDA device; --device cpu runs the same code at tiny sizes",
            file=sys.stderr,
        )
        return 2
    ends_at = time.monotonic() + 60 * args.minutes
    reports = []
    for section in SECTIONS:
        if args.only and section.name not in args.only:
            continue
        left = ends_at - time.monotonic()
        if obstacle := find_obstacle(section, place.num_devices):
            report = SectionReport(section.name, "does not apply", obstacle)
        elif left < SLACK_SECONDS:
            report = SectionReport(
                section.name,
                "left out",
                f"the {args.minutes:g} minutes are over; run --only {section.name}",
            )
        else:
            report = run_apart(section, place, min(section.limit_seconds * place.patience, left))
        print(report.text(), flush=True)
        reports.append(report)
        # Written after each section, so that the report is kept if this process is ended.
        if args.json:
            write_json(Path(args.json), place, reports)
    return 0 if all(report.is_good for report in reports) else 1


def parse_arguments() -> argparse.Namespace:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], help=f"some of {', '.join(names)}"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="time for all sections together"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure with torch.compile",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to this file")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := sorted(set(args.only) - set(names)):
        parser.error(f"--only: no section {', '.join(unknown)}; allowed: {', '.join(names)}")
    return args


def run_here(source: str, place: Place) -> NoReturn:
    """Run a section in this process, print one line of JSON for each row, and end the process."""
    # SIGTERM must let the section end the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for row in load_section(source)(place):
        print(json.dumps(row), flush=True)
    # gloo's threads sometimes abort during a normal interpreter shutdown.
    os._exit(0)


def write_json(path: Path, place: Place, reports: list[SectionReport]) -> None:
    values: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": place.device,
        "sections": [report.values() for report in reports],
    }
    path.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
