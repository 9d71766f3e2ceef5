"""How fast the page of `diloco watch` loads a long run of many islands, and shows what is new.

    python -m scripts.bench.scale.watch --islands 32 --rounds 10000

Writes records like those of a run, serves them, opens the page in Chromium (CHROMIUM, else
/usr/bin/chromium), and prints the milliseconds to the first complete page, and the milliseconds
that the page computes for each second's update: the median, the least, and the processor time of
the page's main thread, which other work on the machine does not change.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from diloco.records.metrics import EvalRecord, Metrics, RoundRecord, StepRecord

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
]
ROUND_SECONDS = 30.0
CONFIG = "{{outer: {{inner_steps: 1, rounds: {rounds}}}, model: {{preset: 1m}}}}"
RANKS = [[float(rank), 25.0, 1.0, 20.0 + rank, 0.5, 0.5] for rank in range(2)]
NUM_UPDATES = 10
GUARD_MS = 3_600_000
MEASURE = """() => { const begin = performance.now(); draw(); return performance.now() - begin; }"""


def main() -> None:
    """Write the records of a run, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--islands", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=8477)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = tuple(f"island-{index}" for index in range(given.islands))
        start = time.time() - given.rounds * ROUND_SECONDS
        (Path(folder) / "config.yaml").write_text(CONFIG.format(rounds=2 * given.rounds))
        write_island(Path(folder), names[0], names, range(given.rounds), start)
        for name in names[1:]:  # Records do not name their island.
            shutil.copytree(Path(folder) / names[0], Path(folder) / name)
        measured = measure(Path(folder), names, given.rounds, start, given.port)
    print(json.dumps({"islands": given.islands, "rounds": given.rounds} | measured, indent=2))


def write_island(
    folder: Path, name: str, names: tuple[str, ...], rounds: range, start: float
) -> None:
    """Append the island's records of these rounds: one inner step, the round, and every tenth time
    a held-out loss.
    """
    metrics = Metrics(folder / name / "metrics.jsonl")
    for number in rounds:
        end = start + number * ROUND_SECONDS
        loss = 2.0 + 4.0 / (1 + number)
        tokens = 4096 * (number + 1)
        step = StepRecord(
            step=number + 1,
            tokens=tokens,
            loss=loss,
            lr=1e-3,
            grad_norm=1.0,
            seconds=25.0,
            tokens_per_second=160.0,
            noise_scale={"tokens": 3e4 + number},
            time=end,
        )
        metrics.write(step)
        counts = {
            "bytes_sent": 2_000_000,
            "bytes_received": 2_000_000,
            "reduce_seconds": 3.0,
            "wait_seconds": 1.0,
        }
        metrics.write(
            RoundRecord(
                round=number,
                attempt=0,
                participants=names,
                committed=True,
                digest=f"{number:032x}",
                time=end + 4.0,
                pseudo_gradient_norm=1.0,
                mean_norm=0.5,
                mean_cosine=0.7,
                ranks=RANKS,
                steps=1,
                tokens=4096,
                **counts,
            )
        )
        if number % 10 == 0:
            metrics.write(
                EvalRecord(
                    round=number,
                    tokens=tokens * len(names),
                    loss=loss,
                    bits_per_byte=None,
                    time=end + 4.5,
                )
            )
    metrics.close()


def measure(
    folder: Path, names: tuple[str, ...], rounds: int, start: float, port: int
) -> dict[str, float]:
    """Measure the seconds until the server is ready, and the milliseconds of loads and updates."""
    from playwright.sync_api import sync_playwright

    begin = time.monotonic()
    command = [sys.executable, "-m", "diloco", "watch", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None, "the server's output is a pipe"
        server.stdout.readline()
        found = {"server_reads_seconds": round(time.monotonic() - begin, 1)}
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            open_page(page, f"http://127.0.0.1:{port}/")
            loads: list[float] = []
            updates: list[float] = []
            clock = page.context.new_cdp_session(page)
            clock.send("Performance.enable", {"timeDomain": "threadTicks"})
            load_cpu: list[float] = []
            for _ in range(5):
                loads.append(open_page(page, f"http://127.0.0.1:{port}/"))
                load_cpu.append(1000 * cpu_seconds(clock))  # It begins anew with each page.
            page.wait_for_selector(
                "#predicted td", timeout=GUARD_MS
            )  # as on every page after its first seconds
            update_cpu: list[float] = []
            for number in range(NUM_UPDATES):
                for name in names:
                    write_island(
                        folder, name, names, range(rounds + number, rounds + number + 1), start
                    )
                wait_for_round(page, rounds + number)
                before = cpu_seconds(clock)
                updates.append(page.evaluate(MEASURE))
                update_cpu.append(1000 * (cpu_seconds(clock) - before))
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=10)
    found |= {"load_ms": round(median(loads)), "update_ms": round(median(updates), 1)}
    found |= {"least_load_ms": round(min(loads)), "least_update_ms": round(min(updates), 1)}
    return found | {
        "load_cpu_ms": round(median(load_cpu)),
        "update_cpu_ms": round(median(update_cpu), 1),
    }


def cpu_seconds(clock) -> float:
    """Return the processor time of the page's main thread so far.

    `clock`: a session of Chrome's DevTools protocol in the time domain threadTicks.
    """
    metrics = clock.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def wait_for_round(page, number: int) -> None:
    """Wait until the page has received this round of every island."""
    newest = "() => Math.min(...Object.values(run.islands).map((rows) => rows.rounds.at(-1)[1]))"
    deadline = time.monotonic() + GUARD_MS / 1000
    while page.evaluate(newest) < number:
        assert time.monotonic() < deadline, f"round {number} has not reached the page"
        time.sleep(0.05)


def open_page(page, url: str) -> float:
    """Load the page, and return the milliseconds until every panel is drawn."""
    begin = time.monotonic()
    for _ in range(50):
        try:
            page.goto(url, timeout=GUARD_MS)
            break
        except Exception as error:  # The server announces its address just before it listens.
            if "ERR_CONNECTION_REFUSED" not in str(error):
                raise
            time.sleep(0.1)
    page.wait_for_selector("#loss canvas", timeout=GUARD_MS)
    page.wait_for_selector("#rounds tr", timeout=GUARD_MS)
    return 1000 * (time.monotonic() - begin)


if __name__ == "__main__":
    main()
