"""The page of `diloco watch` in a real browser, on a real run over TLS with faults. Needs Debian's
package chromium.

./scripts/test tests/diloco/watch -m slow
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("fastapi")

from playwright.sync_api import Browser, Page, expect, sync_playwright

from diloco.records.logbook import LOGBOOK
from diloco.status.command import find_status
from diloco.watch.saved_page import write_page
from tests.swarm import swarm as islands_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
]
ROOT = Path(__file__).parents[3]
GUARD_SECONDS = 240.0
MIXTURE = (
    "data.mixture=[{name: python, source: python-stdlib, weight: 3}, {name: docs, source: "
    "files, paths: [docs]}]"
)
SETTINGS = [
    *(
        "outer.transport=tls",
        "outer.rounds=26",
        "optimizer.tokens_per_step=2048",
        "evaluate.every_rounds=1",
    ),
    *(
        "evaluate.tokens=8192",
        "name=storm",
        MIXTURE.replace("paths: [docs]", "weight: 1, paths: ['docs/*.md']"),
    ),
]
MAKE_KEY = (
    "import sys, pathlib; from outer.identity.island_key import load_island_key as load; "
    "print(load(pathlib.Path(sys.argv[1])).public)"
)
FAULTS = [
    "kill:1@round=4,back=12",
    "freeze:2@round=12,seconds=10",
    "nan:3@round=16",
    "join:@round=8",
]
PANELS = [
    "#cards article",
    "#headline .state",
    "#incidents li",
    "#loss canvas",
    "#gantt",
    "#bytes canvas",
    "#sources meter",
]
PANELS += [
    "#bytes canvas",
    "#sources meter",
    "#rates canvas",
    "#predicted td",
    "#norms canvas",
    "#cosines canvas",
    "#ranks td.bar",
]
TABLES = ["#rounds tr", "#happened tr"]
ISLANDS = "islands=[{ranks: 1}, {ranks: 1}, {ranks: 1}, {ranks: 2, micro_batch: 4}]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert Path(CHROMIUM).exists(), (
        f"{CHROMIUM} is not there: apt-get install chromium, or set CHROMIUM"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def storm(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The folder of a run that has begun, and its process."""
    folder = tmp_path_factory.mktemp("runs")
    faults = [word for fault in FAULTS for word in ("--fault", fault)]
    command = [sys.executable, "-m", "diloco", "simulate", "configs/quickstart.yaml", ISLANDS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *SETTINGS, f"island.run_dir={folder}", *faults],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    wait_until(
        lambda: (folder / "storm/island-1/metrics.jsonl").exists() or process.poll() is not None
    )
    assert process.poll() is None, "the run has ended at once; see what it says"
    yield folder / "storm", process
    process.terminate()
    process.wait(timeout=60)


@pytest.fixture(scope="module")
def url(storm: tuple[Path, subprocess.Popen[bytes]]) -> Iterator[str]:
    with serving(str(storm[0])) as url:
        yield url


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """The URL of `diloco watch` with these arguments, while the block lasts."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "diloco", "watch", *words, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield next(line for line in server.stdout if line.startswith("http")).split()[0]
    finally:
        server.terminate()
        server.wait(timeout=20)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)


def open_page(browser: Browser, url: str, errors: list[str], **options) -> Page:
    page = browser.new_page(**options)
    page.on(
        "console",
        lambda message: (
            errors.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    expect(page.locator(PANELS[0]).first).to_be_visible(timeout=20_000)
    return page


def test_a_killed_island_is_seen_as_missing_while_the_others_go_on(
    browser: Browser, url: str
) -> None:
    page = open_page(browser, url, [])
    card = page.locator("article.bad", has_text="island-1")
    expect(card).to_contain_text("lost to island-", timeout=1000 * GUARD_SECONDS)
    expect(page.locator("article", has_text="island-0").first).not_to_have_class("bad")
    page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (360, "light")])
def test_every_panel_is_filled_at_any_width_in_light_and_dark(
    browser: Browser,
    url: str,
    storm: tuple[Path, subprocess.Popen[bytes]],
    width: int,
    scheme: str,
    tmp_path: Path,
) -> None:
    assert storm[1].wait(timeout=GUARD_SECONDS) == 0
    errors: list[str] = []
    page = open_page(
        browser, url, errors, viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    for place in PANELS + TABLES:
        expect(page.locator(place).first).to_be_visible()
    assert page.locator("article").count() == 5
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(
        path=Path(os.environ.get("SCREENSHOTS", tmp_path)) / f"watch-{scheme}-{width}.png",
        full_page=True,
    )
    page.close()
    assert errors == []


def test_the_whole_page_shows_the_moment_that_the_keyboard_chooses(
    browser: Browser, url: str
) -> None:
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


def test_the_first_lines_are_those_of_the_terminal(
    browser: Browser, url: str, storm: tuple[Path, subprocess.Popen[bytes]]
) -> None:
    (seen,) = find_status(str(storm[0]), [], None)
    assert seen.overview is not None
    page = open_page(browser, url, [])
    headline = page.locator("#headline span").all_inner_texts()
    # The time since the last record goes on.
    assert [text.strip("· ") for text in headline][:3] == seen.overview.head[0].split(" · ")[:3]
    page.get_by_label("since when").select_option("0")
    expect(page.locator("#since-text")).to_contain_text(seen.overview.since.split(": ", 1)[1])
    first = page.locator("#incidents li b").first
    expect(first).to_have_text(re.compile("island-. (died|lost)|run aborted"))
    page.close()


@pytest.mark.parametrize(
    ("which", "look"), [("time", "log"), ("bytes", "linear"), ("tokens", "zoom")]
)
def test_losses_are_drawn_against_what_the_reader_chooses(
    browser: Browser, url: str, which: str, look: str
) -> None:
    errors: list[str] = []
    page = open_page(browser, url, errors)
    page.get_by_label("x axis").select_option(which)
    page.get_by_label("y axis").select_option(look)
    page.get_by_label("smoothing").select_option("9")
    expect(page.locator("#loss canvas")).to_be_visible()
    page.close()
    assert errors == []


def test_another_run_in_the_same_folder_of_runs_is_drawn_beside_this_one(
    browser: Browser, url: str, storm: tuple[Path, subprocess.Popen[bytes]]
) -> None:
    shutil.copytree(storm[0], storm[0].parent / "earlier", dirs_exist_ok=True)
    errors: list[str] = []
    page = open_page(browser, url, errors)
    page.get_by_label("beside").select_option("earlier")
    drawn = (
        "() => charts.loss.lines.some((line) => line.label === 'earlier' && line.points.length > 1)"
    )
    page.wait_for_function(drawn)
    page.close()
    assert errors == []


def test_a_plot_is_saved_as_numbers_with_gaps_where_an_island_was_away(
    browser: Browser, url: str
) -> None:
    page = open_page(browser, url, [])
    page.get_by_label("x axis").select_option("time")
    section = page.locator("section", has=page.locator("#bytes"))
    with page.expect_download() as download:
        section.get_by_role("button", name="CSV").click()
    rows = [line.split(",") for line in download.value.path().read_text().splitlines()]
    assert rows[0][:2] == ['"x"', '"island-0"'] and len(rows) > 20
    with page.expect_download() as download:
        section.get_by_role("button", name="PNG").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    page.close()


def test_the_page_as_one_file_opens_without_a_server(
    browser: Browser, storm: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    write_page(storm[0], tmp_path / "storm.html")
    errors: list[str] = []
    requests: list[str] = []
    page = browser.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "storm.html").as_uri())
    for place in PANELS + TABLES:
        expect(page.locator(place).first).to_be_visible()
    assert (
        errors == []
        and [each for each in requests if not each.startswith(("file:", "data:"))] == []
    )
    page.close()


def test_only_trouble_is_shown_on_request(browser: Browser, url: str) -> None:
    page = open_page(browser, url, [])
    everything = page.locator("#happened tr").count()
    page.get_by_label("what to show").select_option("trouble")
    expect(page.locator("#happened td.bad").first).to_be_visible()
    assert 0 < page.locator("#happened tr").count() < everything
    page.close()


def test_two_runs_are_shown_side_by_side(
    browser: Browser, storm: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    errors: list[str] = []
    with serving(str(storm[0]), str(storm[0])) as url:
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.goto(url)
        for place in (
            "#loss-tokens canvas",
            "#loss-time canvas",
            "#committed canvas",
            "#bytes canvas",
            "#figures tr",
        ):
            expect(page.locator(place).first).to_be_visible(timeout=20_000)
        for number in (0, 1):
            frame = page.frame_locator("iframe").nth(number)
            expect(frame.locator("article").first).to_be_visible(timeout=20_000)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(path=Path(os.environ.get("SCREENSHOTS", tmp_path)) / "watch-two.png")
        page.close()
    assert errors == []


def test_a_run_at_an_address_is_shown_lost_and_obeys_its_operator(
    browser: Browser, tmp_path: Path
) -> None:
    key, errors = tmp_path / "operator.key", list[str]()
    made = subprocess.run(
        [sys.executable, "-c", MAKE_KEY, str(key)], capture_output=True, text=True, check=True
    )
    settings = [f"island.run_dir={tmp_path / 'runs'}", f"island.operators=[{made.stdout.strip()}]"]
    settings += ["outer.transport=tls", "outer.rounds=100000"]
    with islands_of(tmp_path, *settings, islands=[{}, {}, {}]) as swarm:
        islands = swarm.start_all()
        for island in islands:
            island.wait_for_round(1)
        with serving(swarm.address, "--control", str(key)) as url:
            page = open_page(browser, url, errors, viewport={"width": 1400, "height": 1000})
            expect(page.locator("article")).to_have_count(3, timeout=20_000)
            islands[2].signal(signal.SIGKILL)
            card = page.locator("article.bad", has_text="island-2")
            expect(card).to_contain_text("no answer", timeout=1000 * GUARD_SECONDS)
            page.get_by_label("island", exact=True).select_option("island-1")
            page.get_by_role("button", name="stop after the round", exact=True).click()
            expect(page.locator("#control-said")).to_contain_text("island-1 leaves after its round")
            page.screenshot(
                path=Path(os.environ.get("SCREENSHOTS", tmp_path)) / "watch-address.png"
            )
            page.get_by_role("button", name="yes, stop after the round").click()
            islands[1].finish()
            expect(page.locator("article", has_text="island-1")).to_contain_text(
                "left", timeout=1000 * GUARD_SECONDS
            )
            page.close()
        assert "ordered: " in (tmp_path / "runs/test" / LOGBOOK).read_text()
    assert errors == []
