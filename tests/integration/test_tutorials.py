"""The tutorials run as they are, and what they say of their results is so: they assert it themselves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_to_its_end(tutorial: Path, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(tutorial)], cwd=tmp_path, env=environment, timeout=290, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = set(re.findall(r"\.\./images/(\w+\.png)\)", tutorial.read_text()))
    assert {path.name for path in tmp_path.glob("*.png")} == drawn


def test_there_are_tutorials() -> None:
    assert len(TUTORIALS) >= 8


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_pages_and_pictures_that_a_tutorial_points_at_are_there(tutorial: Path) -> None:
    for name in re.findall(r"\((\.\./[\w./]+)", tutorial.read_text()):
        assert (tutorial.parent / name).exists(), f"{name} is not there"
