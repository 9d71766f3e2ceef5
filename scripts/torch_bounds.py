"""Prints pyproject.toml's requirement of torch for pip, its lower bound, or all other requirements.

python scripts/torch_bounds.py                     torch>=2.13,<2.14
python scripts/torch_bounds.py --oldest            torch==2.13
python scripts/torch_bounds.py --others hivemind   a line for each other package, also of these
                                                   extras
"""

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main(arguments: list[str]) -> None:
    project = PROJECT.read_text()
    allowed = find_torch(project)
    if arguments[:1] == ["--others"]:
        print(*find_others(project, arguments[1].split(",")), sep="\n")
    else:
        print(oldest_of(allowed) if arguments == ["--oldest"] else allowed)


def find_torch(project: str) -> str:
    """Return the requirement of torch in the text of a pyproject.toml."""
    needs = tomllib.loads(project)["project"]["dependencies"]
    return next(need for need in needs if need.startswith("torch>="))


def find_others(project: str, extras: list[str]) -> list[str]:
    """Return the requirements besides torch in the text of a pyproject.toml, with those of the
    extras.
    """
    found = tomllib.loads(project)["project"]
    needs = [need for need in found["dependencies"] if need != find_torch(project)]
    return needs + [
        need for extra in extras if extra for need in found["optional-dependencies"][extra]
    ]


def oldest_of(allowed: str) -> str:
    """Return the oldest version of a range: torch>=2.13,<2.14 -> torch==2.13."""
    return allowed.partition(",")[0].replace(">=", "==")


if __name__ == "__main__":
    main(sys.argv[1:])
