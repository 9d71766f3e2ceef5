"""What README and docs point at is there."""

import re
from itertools import takewhile
from pathlib import Path

import pytest

from scripts import docs_diagrams, readme_figures
from scripts.results_plots import PAGE, draw_all

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=str)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")
FOLDERS = "configs|scripts|docs|tests|diloco|inner|outer"
NAMED = re.compile(rf"\b(?:{FOLDERS})/[\w./-]+\w\.(?:yaml|py|sh|md)\b|\bscripts\.bench(?:\.\w+)+")
PACKAGES = ("diloco", "inner", "outer")


def anchor(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        found = (page.parent / target) if target else page
        assert found.exists(), f"{target} is not there"
        if heading:
            headings = [
                anchor(line.lstrip("# "))
                for line in found.read_text().splitlines()
                if line.startswith("#")
            ]
            assert heading in headings, f"{target}#{heading} is not a heading: {headings}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=page_id)
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    for name in NAMED.findall(page.read_text()):
        path = name.replace(".", "/") + ".py" if name.startswith("scripts.bench.") else name
        assert (ROOT / path).exists(), f"{name} is not there"


def test_tests_that_answer_for_the_hardware_exist() -> None:
    named = re.findall(r"(tests/[\w/]+\.py) `(\w+)`", (ROOT / "docs" / "hardware.md").read_text())
    assert len(named) > 10
    missing = [words for path, words in named if words not in (ROOT / path).read_text()]
    assert not missing


def tree_in(page: Path) -> dict[str, set[str]]:
    """Folders and files that the section "The tree" of a page shows, by package."""
    tree: dict[str, set[str]] = {name: set() for name in PACKAGES}
    package = ""
    for line in page.read_text().split("## The tree")[1].split("\n## ")[0].splitlines():
        names = list(takewhile(lambda word: word.endswith(("/", ".py")), line.split()))
        if names and not line.startswith(" "):
            package = names[0].rstrip("/")
        elif names:
            tree[package] |= set(names)
    return tree


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_in_the_architecture_shows_every_folder_and_file(package: str) -> None:
    folders = {f"{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
    files = {path.name for path in (ROOT / package).glob("*.py") if not path.name.startswith("__")}
    shown = tree_in(ROOT / "docs" / "architecture.md")[package]
    assert folders | files == shown


def test_the_plots_of_tables_can_be_drawn_and_are_on_the_page(tmp_path: Path) -> None:
    pictures = draw_all(tmp_path)
    assert all(picture.stat().st_size > 10_000 for picture in pictures)
    page = PAGE.read_text()
    assert [picture.name for picture in pictures if f"](images/{picture.name})" not in page] == []


def test_the_diagrams_are_those_that_the_script_draws(tmp_path: Path) -> None:
    for drawn in docs_diagrams.draw_all(tmp_path):
        assert (docs_diagrams.IMAGES / drawn.name).read_text() == drawn.read_text()


def test_the_readme_s_table_and_picture_are_those_of_the_kept_runs(tmp_path: Path) -> None:
    lines = readme_figures.read_lines(tmp_path / "runs")
    readme = (ROOT / "README.md").read_text()
    assert readme_figures.format_table(lines) in readme
    assert readme_figures.draw(lines, tmp_path / "runs", tmp_path).stat().st_size > 10_000
    assert f"docs/images/{readme_figures.PICTURE}" in readme


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_lists_inside_lists_are_indented_by_four_spaces(page: Path) -> None:
    """GitHub takes two; the site would make one flat list of both."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*", text, re.MULTILINE) == []


def test_a_newcomer_reads_the_readme_in_some_minutes() -> None:
    """Lists of everything belong to docs/features.md, figures to docs/results.md."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
