"""What is installed: one name beside other people's packages, and everything that the program needs
inside it.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.torch_bounds import find_others, find_torch, oldest_of

ROOT = Path(__file__).parents[1]
SUFFIXES = ("py", "jinja", "yaml", "html", "css", "js", "sh")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel of this checkout would install."""
    folder = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "setup.py",
        "-q",
        "build",
        "-b",
        str(folder / "build"),
        "--build-lib",
        str(folder / "lib"),
    ]
    subprocess.run(build, cwd=ROOT, timeout=120, check=True, capture_output=True)
    return folder / "lib"


def run_program(program: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, cwd=folders[0], env=environment, timeout=60, capture_output=True, text=True
    )


def test_a_wheel_installs_one_name(installed: Path) -> None:
    assert [path.name for path in installed.iterdir()] == ["diloco"]


def test_every_module_and_template_is_in_the_wheel(installed: Path) -> None:
    homes = {
        "diloco": installed,
        "inner": installed / "diloco/_bundled",
        "outer": installed / "diloco/_bundled",
    }
    wanted = [
        path for name in homes for suffix in SUFFIXES for path in (ROOT / name).rglob(f"*.{suffix}")
    ]
    relative = [path.relative_to(ROOT) for path in wanted]
    assert [path for path in relative if not (homes[path.parts[0]] / path).is_file()] == []


def test_the_installed_program_uses_its_own_packages(installed: Path) -> None:
    done = run_program(
        "import diloco.cli.main, inner.config, outer.config; print(inner.__file__)", installed
    )
    assert done.stdout.strip() == str(installed / "diloco/_bundled/inner/__init__.py"), done.stderr


def test_a_package_inner_of_another_project_is_left_alone_or_named(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/__init__.py").write_text("")
    first = run_program("import diloco, inner; print(inner.__file__)", tmp_path, installed)
    assert first.stdout.strip() == str(installed / "diloco/_bundled/inner/__init__.py"), (
        first.stderr
    )
    late = run_program("import inner, diloco", tmp_path, installed)
    assert (
        late.returncode == 1 and f"{tmp_path}/inner/__init__.py; import diloco first" in late.stderr
    )


def test_the_container_file_installs_the_torch_and_the_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "scripts/launch/Containerfile").read_text()
    torch = next(each for each in project["dependencies"] if each.startswith("torch"))
    assert f'"{torch}"' in text
    extras = next(line for line in text.splitlines() if line.startswith("ARG EXTRAS=")).partition(
        "="
    )[2]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_the_range_of_torch_is_said_once_and_has_an_oldest_that_pip_takes() -> None:
    allowed = find_torch((ROOT / "pyproject.toml").read_text())
    assert (
        "torch>="
        not in (ROOT / "scripts/setup").read_text() + (ROOT / "scripts/torch_range").read_text()
    )
    assert re.fullmatch(r"torch>=(\d+\.\d+),<\d+\.\d+", allowed)
    assert oldest_of("torch>=2.13,<2.16") == "torch==2.13"


def test_a_torch_outside_of_the_range_is_installed_with_all_other_packages_of_the_extras() -> None:
    project = (
        '[project]\ndependencies = ["torch>=2.13,<2.14", "numpy"]\noptional-dependencies = '
        '{web = ["fastapi"]}'
    )
    assert find_others(project, ["", "web"]) == ["numpy", "fastapi"]


def test_a_wheel_made_from_the_sdist_trains_in_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "-e",
        str(tmp_path),
        "sdist",
        "-d",
        str(tmp_path),
    ]
    subprocess.run(build, cwd=ROOT, timeout=120, check=True, capture_output=True)
    source = next(tmp_path.glob("*.tar.gz"))
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
    ]
    subprocess.run(
        [*install, str(tmp_path / "site"), str(source)],
        timeout=120,
        check=True,
        capture_output=True,
    )
    work = tmp_path / "work"
    work.mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    small = [
        "outer.rounds=2",
        "outer.inner_steps=2",
        "optimizer.tokens_per_step=512",
        "island.micro_batch=2",
    ]
    for words in (
        ["init", "first"],
        ["simulate", "first.yaml", *small, "evaluate.tokens=1024"],
        ["report", "runs/first"],
    ):
        command = [sys.executable, "-m", "diloco", *words]
        done = subprocess.run(
            command, cwd=work, env=environment, timeout=240, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr + done.stdout
    assert (
        "Digests equal in every round" in done.stdout
        and (work / "runs/first/report.html").is_file()
    )
    where = [sys.executable, "-c", "import diloco; print(diloco.__file__)"]
    found = subprocess.run(
        where, cwd=work, env=environment, timeout=60, capture_output=True, text=True
    ).stdout
    assert found.strip() == str(tmp_path / "site/diloco/__init__.py")
