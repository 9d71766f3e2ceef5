"""The search of the documentation finds the right page first, and its pages fit a phone. In a real
browser; needs Debian's package chromium.

./scripts/test tests/test_docs_search.py -m slow
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Page, sync_playwright

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
]
ROOT = Path(__file__).parents[1]
PHONE = {"width": 390, "height": 844}
FIRST = {
    "gradient clipping": "configuration/#gradient-clipping",
    "learning rate": "configuration/#learning-rate",
    "MFU": "roofline/#mfu-model-flops-utilisation",
}
"""What is searched for, and what is found first."""
WIDE = """() => [...document.querySelectorAll('.md-content table, .md-content img')]
    .filter(each => each.getBoundingClientRect().right > window.innerWidth)
    .map(each => each.outerHTML.slice(0, 120))"""
"""Tables and pictures that do not fit the window."""


class Quiet(SimpleHTTPRequestHandler):
    """A web server of a folder that says nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, which is built and served."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert Path(CHROMIUM).exists(), (
        f"{CHROMIUM} is not there: apt-get install chromium, or set CHROMIUM"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(120_000)
        yield page
        browser.close()


@pytest.mark.parametrize("words", FIRST)
def test_the_search_finds_the_right_section_first(site: str, page: Page, words: str) -> None:
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto(site)
    page.locator(".md-search__input").fill(words)
    page.locator(".md-search-result__item").first.wait_for()
    links = page.locator(".md-search-result__item a.md-search-result__link")
    found = [
        links.nth(number).get_attribute("href") or "" for number in range(min(2, links.count()))
    ]
    assert any(
        FIRST[words] in link.split("?")[0] + "#" + link.partition("#")[2] for link in found
    ), found


@pytest.mark.parametrize(
    "name", ["", "settings/", "protocol/", "architecture/", "collectives/", "roofline/"]
)
def test_a_page_fits_a_phone(site: str, page: Page, name: str) -> None:
    page.set_viewport_size(PHONE)  # pyright: ignore[reportArgumentType]
    page.goto(site + name)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    if name in ("", "settings/", "collectives/"):
        assert page.evaluate(WIDE) == []
