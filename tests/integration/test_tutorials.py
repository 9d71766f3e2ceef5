"""The tutorials run as they are, and what they say of their results is so: they assert it
themselves.
"""

import json
import re
from pathlib import Path

import pytest

from scripts import docs_tutorials

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.py"))
VARYING = ("a_round_survives", "a_morning_of_faults")
"""Tutorials whose islands meet faults at other moments in each run."""
NUMBER = re.compile(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?|\b[0-9a-f]{8,}\b|tmp\w+")


def without_numbers(output: str) -> str:
    """Numbers, digests and blanks are left out: they are those of a machine, and of a moment."""
    return re.sub(r"\s+", "", NUMBER.sub("", output))


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_to_its_end_and_says_what_is_kept(tutorial: Path, tmp_path: Path) -> None:
    outputs = docs_tutorials.run(tutorial, tmp_path)
    drawn = set(re.findall(r"\.\./images/(\w+\.png)\)", tutorial.read_text()))
    assert {path.name for path in tmp_path.glob("*.png")} == drawn
    kept = json.loads(docs_tutorials.outputs_path(tutorial).read_text())["outputs"]
    assert [bool(output) for output in outputs] == [bool(output) for output in kept]
    if tutorial.stem not in VARYING:
        assert [without_numbers(output) for output in outputs] == [
            without_numbers(output) for output in kept
        ]


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_the_outputs_that_are_kept_are_of_the_tutorial_as_it_is(tutorial: Path) -> None:
    kept = json.loads(docs_tutorials.outputs_path(tutorial).read_text())
    cure = f"python -m scripts.docs_tutorials {tutorial.stem}"
    assert kept["code_sha256"] == docs_tutorials.code_digest(tutorial), cure
    kinds = [kind for kind, _ in docs_tutorials.cells_of(tutorial)]
    assert len(kept["outputs"]) == kinds.count("code") and any(kept["outputs"])


def test_there_are_tutorials() -> None:
    assert len(TUTORIALS) >= 10


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_pages_and_pictures_that_a_tutorial_points_at_are_there(tutorial: Path) -> None:
    for name in re.findall(r"\((\.\./[\w./]+)", tutorial.read_text()):
        assert (tutorial.parent / name).exists(), f"{name} is not there"
