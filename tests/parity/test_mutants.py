"""Each fault in mutants.yaml makes a test fail. Slow: pytest -m slow
tests/parity/test_mutants.py
"""

import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml


@dataclass(frozen=True)
class Mutant:
    """One fault: see the file."""

    what: str
    path: str
    old: str
    new: str
    caught_by: str


ROOT = Path(__file__).parents[2]
MUTANTS = [
    Mutant(**values)
    for values in yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text())
]
PACKAGES = ("inner", "outer", "diloco", "tests", "scripts", "configs")
LIMIT_SECONDS = 600
FAILED = 1
"""Exit status of pytest if tests failed, and not for an error of its own."""


def test_each_mutant_changes_one_place_of_the_code() -> None:
    for mutant in MUTANTS:
        assert (ROOT / mutant.path).read_text().count(mutant.old) == 1, mutant.what
        assert mutant.old != mutant.new


def test_each_mutant_is_named_once() -> None:
    assert max(Counter(mutant.what for mutant in MUTANTS).values()) == 1


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code to put faults into."""
    folder = tmp_path_factory.mktemp("mutants")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    path, *chosen = tests.split(" -k ")
    words = [
        path,
        *(["-k", chosen[0]] if chosen else []),
        "-x",
        "-m",
        "slow or not slow",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", str(LIMIT_SECONDS), *words]
    environment = {
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "HOME": str(folder),
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS + 30,
    )


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_fault_is_caught(copy: Path, mutant: Mutant) -> None:
    path = copy / mutant.path
    whole = path.read_text()
    path.write_text(whole.replace(mutant.old, mutant.new))
    try:
        found = run(copy, mutant.caught_by)
    finally:
        path.write_text(whole)
    assert "from pytest-timeout" not in found.stdout, (
        "the test ended at its time limit, which shows nothing"
    )
    assert found.returncode == FAILED, found.stdout[-2000:] + found.stderr[-2000:]
