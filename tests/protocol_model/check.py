"""Checks the model of the round protocol with Spin and prints one table: `python -m
tests.protocol_model.check`.

One search runs at a time, in at most 10 GB.
"""

import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

from tests.protocol_model.configurations import CONFIGURATIONS, LIMITS, MUTATIONS, Configuration

FOLDER = Path(__file__).parent
MAX_BYTES = 10 << 30
MAX_SECONDS = 600
MISSING = "{} is missing. It is in the package `{}` of Debian and Ubuntu: apt-get install {}"
STEP = re.compile(r"^\s*((?:island|planner|the islands|cut|the cut) .*|cut: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What one run of Spin found. `trace`: the events that lead to the violation, in plain
    words.
    """

    configuration: Configuration
    verdict: str
    num_states: int
    megabytes: float
    seconds: float
    trace: tuple[str, ...]

    @property
    def is_expected(self) -> bool:
        return self.verdict == self.configuration.expected


class ToolMissing(RuntimeError):
    """Spin or a C compiler is not installed."""


def check_tools() -> None:
    """Raise ToolMissing, with the package that brings what is missing."""
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            raise ToolMissing(MISSING.format(tool, tool, tool))


def check(configuration: Configuration, max_seconds: float = MAX_SECONDS) -> Result:
    """Search all states of a configuration. The verdict is "holds", "violated" or "not ended"."""
    check_tools()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in FOLDER.glob("*.pml"):
            shutil.copy(model, folder)
        return _run(configuration, folder, max_seconds)


def _run(configuration: Configuration, folder: Path, max_seconds: float) -> Result:
    defines = [f"-D{word}" for word in configuration.defines.split()]
    _call(["spin", *defines, "-a", configuration.model], folder)
    speed = (
        "-O0" if configuration.is_quick else "-O1"
    )  # To compile a model takes longer than to search a small one.
    _call(["gcc", speed, "-w", *_find_compiler_flags(configuration), "-o", "pan", "pan.c"], folder)
    # Not "-f": every run of the model ends, and with it Spin 6.5 overlooks the ends. Mutations show
    # that.
    flags = ["-a"] if configuration.is_liveness else ["-E"]
    started = time.monotonic()
    try:
        said = subprocess.run(
            ["./pan", "-m1000000", *flags],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=max_seconds,
            preexec_fn=_limit_memory,
        ).stdout
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode()
    seconds = time.monotonic() - started
    verdict = _find_verdict(said)
    trace = _read_trace(configuration, defines, folder) if verdict == "violated" else ()
    return Result(configuration, verdict, _find_states(said), _find_megabytes(said), seconds, trace)


def _find_compiler_flags(configuration: Configuration) -> list[str]:
    flags = [] if configuration.is_liveness else ["-DSAFETY"]
    if configuration.search == "bitstate":
        return [*flags, "-DBITSTATE"]
    # It stores the parts of states once, and forgets none: slower, in a fraction of the memory.
    return flags if configuration.is_quick else [*flags, "-DCOLLAPSE"]


def _call(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0 or "Error:" in done.stdout:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))


def _find_verdict(said: str) -> str:
    found = re.search(r"errors: (\d+)", said)
    if "invalid array index" in said:
        raise RuntimeError(f"the model itself is wrong: {said[:300]}")
    if found is not None and found.group(1) != "0":
        return "violated"
    is_whole = (
        found is not None
        and "Search not completed" not in said
        and "max search depth too small" not in said
    )
    return "holds" if is_whole else "not ended"


def _find_states(said: str) -> int:
    found = re.search(r"(\d+) states, stored", said)
    if found is not None:
        return int(found.group(1))
    progress = re.findall(r"States=\s*([\d.e+]+)", said)
    return int(float(progress[-1])) if progress else 0


def _find_megabytes(said: str) -> float:
    found = re.findall(r"([\d.]+)\s+(?:total actual memory usage|memory usage \(Mbyte\))", said)
    progress = re.findall(r"Memory=\s*([\d.]+)", said)
    return float((found or progress or ["0"])[-1])


def _read_trace(configuration: Configuration, defines: list[str], folder: Path) -> tuple[str, ...]:
    trail = f"{configuration.model}.trail"
    command = ["spin", "-t", "-T", "-k", trail, *defines, configuration.model]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    return tuple(STEP.findall(said))


def format_line(result: Result) -> str:
    """One line of the table."""
    c = result.configuration
    states = f"{result.num_states:,}" + (" (bitstate)" if c.search == "bitstate" else "")
    mark = "" if result.is_expected else " (UNEXPECTED)"
    figures = (
        f"{states} | {result.megabytes:.0f} MB | {result.seconds:.1f} s | {result.verdict}{mark}"
    )
    return f"| {c.name} | `{c.defines}` | {figures} |"


def parse(words: list[str]) -> Namespace:
    parser = ArgumentParser(description="Check the model of the round protocol with Spin.")
    parser.add_argument("--quick", action="store_true", help="only what takes seconds")
    parser.add_argument("--rest", action="store_true", help="only what takes longer")
    parser.add_argument("--traces", action="store_true", help="print the events of each violation")
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS, help="limit of each search")
    parser.add_argument("defines", nargs="*", help="only configurations with all of these defines")
    return parser.parse_args(words)


def is_chosen(configuration: Configuration, wanted: Namespace) -> bool:
    """Whether the command line asks for a configuration."""
    if (wanted.quick and not configuration.is_quick) or (wanted.rest and configuration.is_quick):
        return False
    return set(wanted.defines) <= set(configuration.defines.split())


def main(words: list[str]) -> int:
    wanted = parse(words)
    print(
        "| configuration | defines | states | memory | time | verdict |\n|---|---|---|---|---|---|",
        flush=True,
    )
    results: list[Result] = []
    for configuration in (*CONFIGURATIONS, *MUTATIONS, *LIMITS):
        if not is_chosen(configuration, wanted):
            continue
        result = check(configuration, wanted.seconds)
        results.append(result)
        print(format_line(result), flush=True)
        if wanted.traces:
            print("\n".join(f"    {step}" for step in result.trace), flush=True)
    return int(not all(result.is_expected for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
