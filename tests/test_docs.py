"""What README and docs point at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=str)
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")
NAMED = re.compile(r"\b(?:configs|scripts|docs)/[\w./-]+\w\.(?:yaml|py|sh|md)\b|\bscripts\.bench\.\w+")


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
            headings = [anchor(line.lstrip("# ")) for line in found.read_text().splitlines() if line.startswith("#")]
            assert heading in headings, f"{target}#{heading} is not a heading: {headings}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=page_id)
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    for name in NAMED.findall(page.read_text()):
        path = name.replace(".", "/") + ".py" if name.startswith("scripts.bench.") else name
        assert (ROOT / path).exists(), f"{name} is not there"
