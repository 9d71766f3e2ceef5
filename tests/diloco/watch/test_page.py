"""The page of `diloco watch` in a real browser, on a real run over TLS with faults. Needs Debian's package chromium.

./scripts/test tests/diloco/watch -m slow
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
ROOT = Path(__file__).parents[3]
GUARD_SECONDS = 240.0
MIXTURE = "data.mixture=[{name: python, source: python-stdlib, weight: 3}, {name: docs, source: files, paths: [docs]}]"
SETTINGS = [
    *("outer.transport=tls", "outer.rounds=26", "optimizer.tokens_per_step=2048", "evaluate.every_rounds=1"),
    *("evaluate.tokens=8192", "name=storm", MIXTURE.replace("paths: [docs]", "weight: 1, paths: ['docs/*.md']")),
]
FAULTS = ["kill:1@round=4,back=12", "freeze:2@round=12,seconds=10", "nan:3@round=16", "join:@round=8"]
PANELS = ["#cards article", "#loss-tokens canvas", "#loss-time canvas", "#gantt", "#bytes canvas", "#sources meter"]
TABLES = ["#rounds tr", "#happened tr"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert Path(CHROMIUM).exists(), f"{CHROMIUM} is not there: apt-get install chromium, or set CHROMIUM"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The folder of a run that has begun, and its process."""
    folder = tmp_path_factory.mktemp("runs")
    faults = [word for fault in FAULTS for word in ("--fault", fault)]
    command = [sys.executable, "-m", "diloco", "simulate", "configs/quickstart.yaml", "--islands", "4", "--ranks", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *SETTINGS, f"island.run_dir={folder}", *faults], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    )
    wait_until((folder / "storm/island-1/metrics.jsonl").exists)
    yield folder / "storm", process
    process.terminate()
    process.wait(timeout=60)


@pytest.fixture(scope="module")
def url(storm: tuple[Path, subprocess.Popen[bytes]]) -> Iterator[str]:
    command = [sys.executable, "-m", "diloco", "watch", str(storm[0]), "--port", "8519"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().split()[0]
    server.terminate()
    server.wait(timeout=20)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)


def open_page(browser: Browser, url: str, errors: list[str], **options) -> Page:
    page = browser.new_page(**options)
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    expect(page.locator(PANELS[0]).first).to_be_visible(timeout=20_000)
    return page


def test_a_killed_island_is_seen_as_missing_while_the_others_go_on(browser: Browser, url: str) -> None:
    page = open_page(browser, url, [])
    card = page.locator("article.bad", has_text="island-1")
    expect(card).to_contain_text("not in round", timeout=1000 * GUARD_SECONDS)
    expect(page.locator("article", has_text="island-0")).not_to_have_class("bad")
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (360, "light")])
def test_every_panel_is_filled_at_any_width_in_light_and_dark(
    browser: Browser, url: str, storm: tuple[Path, subprocess.Popen[bytes]], width: int, scheme: str, tmp_path: Path
) -> None:
    assert storm[1].wait(timeout=GUARD_SECONDS) == 0
    errors: list[str] = []
    page = open_page(browser, url, errors, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for place in PANELS + TABLES:
        expect(page.locator(place).first).to_be_visible()
    assert page.locator("article").count() == 5
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(path=Path(os.environ.get("SCREENSHOTS", tmp_path)) / f"watch-{scheme}-{width}.png", full_page=True)
    page.close()
    assert errors == []


def test_the_whole_page_shows_the_moment_that_the_keyboard_chooses(browser: Browser, url: str) -> None:
    page = open_page(browser, url, [])
    scrubber = page.get_by_label("moment of the run")
    rounds = page.locator("#rounds tr")
    before = rounds.count()
    scrubber.focus()
    page.keyboard.press("Home")
    expect(page.locator("article", has_text="island-4")).to_contain_text("not started")
    expect(rounds).to_have_count(0)
    page.get_by_role("button", name="latest").press("Enter")
    expect(rounds).to_have_count(before)
    page.close()
