"""Set-up: which Pythons it takes, and what it says of the others."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRETENDER = """#!{python}
# This Python, which says that it is another one. It is asked with -c alone.
import sys

sys.version_info = {version}
code = sys.argv[2]
sys.argv[:] = ["-c", *sys.argv[3:]]
exec(code)
"""


def set_up(python: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup with a Python, for an environment in which everything is installed
    already.
    """
    found = subprocess.run(
        ["cksum"], input=(ROOT / "pyproject.toml").read_bytes(), capture_output=True, check=True
    )
    (folder / ".installed").write_bytes(found.stdout.strip())
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHON": python, "VENV": str(folder)}
    return subprocess.run(
        [ROOT / "scripts/setup"], env=environment, timeout=60, capture_output=True, text=True
    )


def pretender(version: tuple[int, ...], folder: Path) -> str:
    """A Python that says that it is of this version."""
    path = folder / "python"
    path.write_text(PRETENDER.format(python=sys.executable, version=version))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 4), (3, 13, 9)])
def test_a_python_in_the_range_is_taken(version: tuple[int, ...], tmp_path: Path) -> None:
    done = set_up(pretender(version, tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", [(3, 8, 20), (3, 10, 13), (3, 14, 0), (4, 0, 0)])
def test_another_one_is_refused_with_what_is_allowed_and_the_cure(
    version: tuple[int, ...], tmp_path: Path
) -> None:
    done = set_up(pretender(version, tmp_path), tmp_path)
    got = ".".join(map(str, version))
    assert done.returncode == 1
    assert f"is Python {got}; diloco takes 3.11 or newer, below 3.14" in done.stderr
    assert "PYTHON=/path/to/python3.11 scripts/setup" in done.stderr


def test_no_python_at_all_is_said(tmp_path: Path) -> None:
    done = set_up(str(tmp_path / "nowhere"), tmp_path)
    assert done.returncode == 1 and "install Python 3.11 or newer, below 3.14" in done.stderr


def test_pip_takes_the_same_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.11,<3.14"
    assert project["tool"]["pyright"]["pythonVersion"] == "3.11"
    assert project["tool"]["ruff"]["target-version"] == "py311"
