"""Fuzzes one group in this process, which libFuzzer ends when it has made as many inputs as it was
told.

    python -m tests.fuzz.drive GROUP FINDINGS LAUNCHER [libFuzzer's own arguments]

An input that breaks a promise is kept in the folder FINDINGS, under a name for the place where it
breaks it, and the fuzzing goes on. LAUNCHER is a program that does the same as this one: libFuzzer
starts it where it needs a process.
"""

import gc
import hashlib
import importlib
import json
import logging
import os
import sys
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_KEPT = 3
"""Inputs that are kept of one finding."""
COUNTS, COUNTED_EVERY = "counts.json", 1000
"""The file beside FINDINGS that says how many inputs each decoder has had, and after how many it is
written anew.
"""


atheris: Any = importlib.import_module("atheris")


def main(group: str, findings: Path, arguments: list[str]) -> None:
    """Fuzz the group."""
    yield_to_others()
    with atheris.instrument_imports(
        include=["outer", "diloco", "inner", "yaml"], enable_loader_override=False
    ):
        from tests.fuzz.groups import GROUPS

        entries = GROUPS[group]()
    from tests.fuzz.entries import seeds_of, split
    from tests.fuzz.judge import judge
    from tests.fuzz.landmarks import Landmarks
    from tests.fuzz.mutator import Mutator

    logging.disable()
    landmarks = Landmarks(atheris.instrument_func)
    mutator = Mutator(
        entries, lambda data, most: atheris.Mutate(data, most)
    )  # Setup brings another one.
    for data in seeds_of(entries):  # What first calls load is there, and is no finding.
        name, body = split(entries, data)
        judge(entries[name], body)
    gc.collect()
    gc.freeze()
    counts = Counter[str]()

    def judge_input(data: bytes) -> None:
        name, body = split(entries, data)
        counts[name] += 1
        if (
            counts.total() % COUNTED_EVERY == 0
        ):  # Nothing of this runs when libFuzzer ends the process.
            (findings.parent / COUNTS).write_text(json.dumps(counts))
        try:
            landmarks.reach(name, judge(entries[name], body))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            keep_finding(findings, name, data, error)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        return mutator(bytes(data), max_size, seed)

    atheris.Setup(arguments, judge_input, custom_mutator=mutate)
    atheris.Fuzz()


def yield_to_others() -> None:
    """Give this process the lowest priority, and its session, which is its own, too."""
    os.nice(19)
    with suppress(OSError):  # The kernel may have no groups of sessions.
        Path("/proc/self/autogroup").write_text("19")


def keep_finding(folder: Path, name: str, data: bytes, error: Exception) -> None:
    """Keep the input and what it did, unless there are enough of the same kind."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    kind = hashlib.sha256(f"{name} {type(error).__name__} {places}".encode()).hexdigest()[:12]
    place = folder / kind
    if place.exists() and len(list(place.glob("input-*"))) >= MOST_KEPT:
        return
    place.mkdir(parents=True, exist_ok=True)
    (place / f"input-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
    (place / "error.txt").write_text(f"{name}\n" + "".join(traceback.format_exception(error)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
