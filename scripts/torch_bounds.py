"""Prints pyproject.toml's requirement of torch for pip: the whole range, or its lower bound.

python scripts/torch_bounds.py             torch>=2.13,<2.14
python scripts/torch_bounds.py --oldest    torch==2.13
"""

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main(arguments: list[str]) -> None:
    allowed = find_torch(PROJECT.read_text())
    print(oldest_of(allowed) if arguments == ["--oldest"] else allowed)


def find_torch(project: str) -> str:
    """Return the requirement of torch in the text of a pyproject.toml."""
    needs = tomllib.loads(project)["project"]["dependencies"]
    return next(need for need in needs if need.startswith("torch>="))


def oldest_of(allowed: str) -> str:
    """Return the oldest version of a range: torch>=2.13,<2.14 -> torch==2.13."""
    return allowed.partition(",")[0].replace(">=", "==")


if __name__ == "__main__":
    main(sys.argv[1:])
