"""Command-line arguments that several benchmarks share."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Collection

CHECK_SECONDS = 120.0
PLAIN = "outer.optimizer={lr: 1.0, momentum: 0.0, nesterov: false}"
"""Override that makes the outer step the plain mean of the islands' params, without outer
momentum.
"""


def choices(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """Build an argparse type that accepts a comma-separated list of words from `allowed`."""

    def split(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"got {word!r}; allowed: {', '.join(allowed)}")
        return words

    return split


def whole_numbers(text: str) -> list[int]:
    """Parse a comma-separated list of whole numbers, as an argparse type."""
    return [int(word) for word in text.split(",")]


def add_torchft_python(parser: argparse.ArgumentParser) -> None:
    """Add --torchft-python, whose value `require_torchft` checks when a contestant needs it."""
    told = (
        "python -m venv VENV; echo SITE > VENV/lib/python3.*/site-packages/diloco.pth; "
        "VENV/bin/pip install torchft"
    )
    parser.add_argument(
        "--torchft-python",
        default=sys.executable,
        metavar="PATH",
        help="a Python with torchft, torch and this project's dependencies; default: this one. To "
        f"create one: {told}, where SITE is the folder of this project's installed packages: "
        "then all contestants use the same torch",
    )


def require_torchft(parser: argparse.ArgumentParser, python: str) -> None:
    """End the program with an error unless `python` can import torchft beside this project's
    packages.
    """
    command = [python, "-c", "import torch, torchft, pydantic"]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=CHECK_SECONDS
        )
    except OSError as error:
        parser.error(f"--torchft-python: got {python!r}, which does not start: {error}")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        parser.error(
            f"--torchft-python: got {python!r}, which cannot import torchft: {why}; --help says "
            "how to make one"
        )
