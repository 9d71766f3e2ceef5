"""The documentation builds as a site without a warning, and its generated pages are complete."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} | {"commands", "api"}
    assert {path.parent.name for path in site.glob("*/index.html")} >= pages


def test_the_page_of_commands_has_those_of_users(site: Path) -> None:
    text = (site / "commands/index.html").read_text()
    assert all(
        f"diloco {name}</code>" in text
        for name in ("simulate", "plan", "join", "watch", "settings")
    )
    assert "diloco baseline</code>" not in text


def test_the_page_of_the_python_api_has_what_the_docstrings_say(site: Path) -> None:
    text = (site / "api/index.html").read_text()
    said = (
        "Blocks until the run's first islands",
        "Count one optimizer step",
        "handles_shards",
        "exact payload size",
        "weights_of",
    )
    assert [each for each in said if each not in text] == []
    assert "_open" not in text and ">>> " not in text.replace(
        '<span class="gp">&gt;&gt;&gt; </span>', ""
    )


def test_a_tutorial_is_a_page_with_its_code(site: Path) -> None:
    text = (site / "tutorials/what_a_codec_does/index.html").read_text()
    assert "error feedback" in text and "build_codec" in text and "jupytext" not in text
    kept = json.loads((ROOT / "docs/tutorials/outputs/what_a_codec_does.json").read_text())[
        "outputs"
    ]
    blocks = re.findall(r'<div class="output highlight"><pre>(.*?)</pre>', text, re.DOTALL)
    shown = [html.unescape(re.sub(r"<[^>]*>", "", block)).strip() for block in blocks]
    assert shown == [output.strip() for output in kept if output]


def test_every_tutorial_shows_what_it_printed_and_its_pictures_open(site: Path) -> None:
    for tutorial in (ROOT / "docs/tutorials").glob("*.py"):
        text = (site / "tutorials" / tutorial.stem / "index.html").read_text()
        assert 'class="output highlight"' in text, tutorial.stem
        for picture in re.findall(r"\.\./images/(\w+\.png)\)", tutorial.read_text()):
            assert f'<a href="../../images/{picture}"><img' in text, picture


def test_the_decisions_are_listed(site: Path) -> None:
    text = (site / "decisions/index.html").read_text()
    assert all(path.stem in text for path in (ROOT / "docs/decisions").glob("0*.md"))


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loads = ('src="http', "src='http", 'rel="stylesheet" href="http', 'rel="preconnect"')
    assert [
        page for page in site.rglob("*.html") if any(each in page.read_text() for each in loads)
    ] == []


def test_each_setting_stands_in_its_section_with_what_a_phone_shows_before_its_cells(
    site: Path,
) -> None:
    text = (site / "settings/index.html").read_text()
    keys = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    rows = re.findall(r"<tr>\s*<td><code>(.+?)</code></td>", text)
    assert sorted(row.replace("<wbr>", "") for row in rows) == sorted(keys)
    assert (
        text.count(' data-head="allowed"') == text.count(' data-head="default"') == len(keys) > 200
    )
    assert all(
        f'id="section-{name}"' in text for name in ("model", "data", "optimizer", "outer", "island")
    )


def test_the_home_page_has_pictures_and_each_diagram_of_a_page_is_there(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert len(re.findall(r'<img [^>]*src="images/', home)) >= 3
    for page in site.rglob("*.html"):
        for source in re.findall(r'<img [^>]*src="([^":]+)"', page.read_text()):
            assert (page.parent / source).exists(), f"{page}: {source}"
