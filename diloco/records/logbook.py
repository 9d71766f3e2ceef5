"""RUN_DIR/LOGBOOK.md: what happened in a run, for its operators. Each entry is one line; all
islands write to it.
"""

import json
import logging
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from diloco.config.overrides import flatten
from diloco.config.schema import IslandConfig, RunConfig
from diloco.formatting import one_line
from diloco.records.best_effort import best_effort
from diloco.records.environment import write_environment
from diloco.records.figures import ENDS
from inner.files import try_lock, write_atomically
from inner.mesh import resolve_degrees
from outer.packages import find_version

log = logging.getLogger(__name__)

LOGBOOK = "LOGBOOK.md"
START = "start.json"
"""A file in the island's folder with the config of its last start."""
MAX_CHARACTERS = 600
TAIL_BYTES = 1 << 16
PACKAGES = ("torch", "hivemind")
"""The packages that determine how an island computes and communicates."""
LOCK_SECONDS = 2.0
"""Longest wait for the file's lock: a process suspended while it holds the lock stops no other."""
IGNORED_KEYS = ("bootstrap", "faults", "joins", "index", "alerts.webhook")
"""Keys of an island's config that launchers change at each start, and one whose value may be a
secret.
"""


class Logbook:
    """The entries of one island. Islands on one machine, or on several with a shared file system,
    write to one file.
    """

    def __init__(self, run_dir: Path, island: str) -> None:
        self.path = run_dir / LOGBOOK
        self.island = island

    def note(self, name: str, text: str) -> None:
        """Append an entry as one line, under the file's lock. Never raises.

        An entry that cannot be written is logged instead, as a warning the first time in a process.
        """
        entry = (
            f"- {datetime.now(UTC):%Y-%m-%d %H:%M:%SZ} **{self.island}** "
            f"{one_line(f'{name}: {text}')}"
        )
        if len(entry) > MAX_CHARACTERS:
            entry = entry[: MAX_CHARACTERS - 3] + "..."
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                lock_soon(file)
                if os.fstat(file.fileno()).st_size == 0:
                    file.write(f"# Logbook of {self.path.parent.name}\n\n")
                file.write(entry + "\n")
            _unwritable.discard(self.path)
        except OSError as error:
            level = logging.INFO if self.path in _unwritable else logging.WARNING
            log.log(level, "%s: no entry was written (%s): %s", self.path, error.strerror, entry)
            _unwritable.add(self.path)

    def note_start(self, run: RunConfig, island: IslandConfig) -> str:
        """Write entries about a start: config and versions. Return how the island ended before.

        That is empty at its first start. At a restart also the last end and changed keys. A part
        that fails is left out with a warning.
        """
        config = flatten({**run.model_dump(mode="json"), "island": island.model_dump(mode="json")})
        mesh = resolve_degrees(island.mesh, island.ranks)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        folder = self.path.parent / self.island
        entries = self.last_entries()
        previous = read_start(folder)
        name = "started" if previous is None else "started again"
        by = "" if restarts == "0" else f", restart {restarts}"
        self.note(
            name, f"config {run.hash}, {mesh}, on {socket.gethostname()}, {describe_software()}{by}"
        )
        last_end = ""
        if previous is not None:
            last_end = describe_end(entries) if entries else "its end is not in the logbook"
            if entries:
                self.note("cause", last_end)
            for change in differences(previous, config):
                self.note("config changed", change)
        with best_effort("the island's environment.json was not written"):
            for key, change in write_environment(folder).items():
                self.note("environment changed", f"{key}: {change}")
        with best_effort(f"the island's {START} was not written"):
            write_atomically(folder / START, json.dumps(config, indent=1) + "\n")
        return last_end

    def last_entries(self) -> list[str]:
        """Return this island's entries since its last start, without its name.

        The list is empty if the end of the file has none that can be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        mark = f" **{self.island}** "
        entries = [line.split(mark, 1)[1] for line in lines if mark in line]
        starts = [number for number, entry in enumerate(entries) if entry.startswith("started")]
        return entries[starts[-1] :] if starts else entries


_unwritable: set[Path] = set()
"""Logbooks for which this process has already logged a warning about a missing entry."""


def lock_soon(file: IO) -> None:
    """Lock the open file exclusively, or go on without the lock after LOCK_SECONDS.

    That is safe enough, because an entry is a single write.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while not try_lock(file) and time.monotonic() < deadline:
        time.sleep(0.01)


def describe_software() -> str:
    """Return the versions of Python and of the installed ones among PACKAGES, as text."""
    found = [
        ("Python", platform.python_version()),
        *((name, find_version(name)) for name in PACKAGES),
    ]
    return ", ".join(f"{name} {number}" for name, number in found if number)


def describe_end(entries: Sequence[str]) -> str:
    """Describe how the processes that wrote these entries ended."""
    # The launcher knows which rank ended first, and how. Without its entry the first event of ENDS
    # is the cause: when one rank fails, the others are stopped.
    if died := next((entry for entry in entries if entry.startswith("died:")), ""):
        return f"it last ended with '{died}'"
    if end := next((entry for entry in entries if entry.split(":", 1)[0] in ENDS), ""):
        return f"it last ended with '{end}'"
    return (
        "it last ended without an entry (it was killed, or its machine was lost); its last "
        f"entry is '{entries[-1]}'"
    )


def read_start(folder: Path) -> dict[str, Any] | None:
    """Return the config of the island's last start; None if there is none that can be read."""
    try:
        values = json.loads((folder / START).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line for each key whose value has changed, except for IGNORED_KEYS."""
    return [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted({**before, **now})
        if before.get(key) != now.get(key) and key.removeprefix("island.") not in IGNORED_KEYS
    ]
