"""The floors of the house: who may import whom, and what a newcomer may count on."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {"inner": {"inner"}, "outer": {"outer"}, "diloco": {"diloco", "inner", "outer"}}
HIVEMIND_HOMES = ("outer/transports/hivemind", "outer/membership/")
MAX_LINES = 320


def modules() -> list[Path]:
    return [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


# At once, before tests start threads: Python 3.11's parser fails when another thread parses at the same time.
IMPORTED = {path: imported(path) for path in modules()}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_its_own_floor_and_those_below_only(path):
    package = path.relative_to(ROOT).parts[0]
    tops = {name.split(".")[0] for name in IMPORTED[path]} & set(MAY_IMPORT)
    assert tops <= MAY_IMPORT[package]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_hivemind_is_imported_in_its_own_files_only(path):
    uses = any(name.split(".")[0] == "hivemind" for name in IMPORTED[path])
    assert not uses or str(path.relative_to(ROOT)).startswith(HIVEMIND_HOMES)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_enough_to_be_read_at_once(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", ["diloco.cli", "diloco.config", "inner.config", "outer.config", "diloco.check"])
def test_the_command_line_and_configs_import_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'hivemind' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_every_package_is_listed_for_installation():
    listed = (ROOT / "pyproject.toml").read_text()
    packages = {".".join(path.relative_to(ROOT).parent.parts) for path in modules()}
    assert all(f'"{package}"' in listed for package in packages)
