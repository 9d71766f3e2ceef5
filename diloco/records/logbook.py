"""RUN_DIR/LOGBOOK.md: what happened in a run, for its operators. Each entry is one line; all islands write to it."""

import json
import logging
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diloco.config.overrides import flatten
from diloco.config.schema import IslandConfig, RunConfig
from diloco.formatting import one_line
from diloco.records.environment import write_environment
from diloco.records.latest import ENDS
from inner.files import wait_for_lock, write_atomically
from inner.mesh import resolve_degrees

log = logging.getLogger(__name__)

LOGBOOK = "LOGBOOK.md"
START = "start.json"
"""A file in the island's folder with the config of its last start."""
MAX_CHARACTERS = 600
TAIL_BYTES = 1 << 16
PACKAGES = ("torch", "hivemind")
"""The packages that determine how an island computes and communicates."""
IGNORED_KEYS = ("bootstrap", "faults", "joins", "index")
"""Keys of an island's config that launchers set anew at each start."""


class Logbook:
    """The entries of one island. Islands on one machine, or on several with a shared file system, write to one file."""

    def __init__(self, run_dir: Path, island: str) -> None:
        self.path = run_dir / LOGBOOK
        self.island = island

    def note(self, name: str, text: str) -> None:
        """Append an entry as one line, under the file's lock. An entry that cannot be written is logged instead."""
        entry = f"- {datetime.now(UTC):%Y-%m-%d %H:%M:%SZ} **{self.island}** {one_line(f'{name}: {text}')}"
        if len(entry) > MAX_CHARACTERS:
            entry = entry[: MAX_CHARACTERS - 3] + "..."
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                wait_for_lock(file)
                if os.fstat(file.fileno()).st_size == 0:
                    file.write(f"# Logbook of {self.path.parent.name}\n\n")
                file.write(entry + "\n")
        except OSError as error:
            log.warning("%s: no entry was written (%s): %s", self.path, error.strerror, entry)

    def note_start(self, run: RunConfig, island: IslandConfig) -> None:
        """Note a start with its config and versions; at a restart also how the island ended and the changed keys."""
        config = flatten({**run.model_dump(mode="json"), "island": island.model_dump(mode="json")})
        mesh, restarts = resolve_degrees(island.mesh, island.ranks), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        entries, previous = self.last_entries(), read_start(self.path.parent / self.island)
        name = "started" if previous is None else "started again"
        by = "" if restarts == "0" else f", restart {restarts}"
        software = ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])
        self.note(name, f"config {run.hash}, {mesh}, on {socket.gethostname()}, {software}{by}")
        if previous is not None:
            if entries:
                self.note("cause", describe_end(entries))
            for change in differences(previous, config):
                self.note("config changed", change)
        for key, change in self._write_environment().items():
            self.note("environment changed", f"{key}: {change}")
        write_atomically(self.path.parent / self.island / START, json.dumps(config, indent=1) + "\n")

    def _write_environment(self) -> dict[str, str]:
        try:
            return write_environment(self.path.parent / self.island)
        except OSError as error:
            log.warning("the island's environment.json was not written: %s", error)
            return {}

    def last_entries(self) -> list[str]:
        """This island's entries since its last start, without its name; [] if the end of the file has none."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        mark = f" **{self.island}** "
        entries = [line.split(mark, 1)[1] for line in lines if mark in line]
        starts = [number for number, entry in enumerate(entries) if entry.startswith("started")]
        return entries[starts[-1] :] if starts else entries


def describe_end(entries: Sequence[str]) -> str:
    """How the processes that wrote these entries ended."""
    # The first such entry is the cause: when one rank fails, the others are stopped.
    if end := next((entry for entry in entries if entry.split(":", 1)[0] in ENDS), ""):
        return f"it last ended with '{end}'"
    return f"it last ended without an entry (it was killed, or its machine was lost); its last entry is '{entries[-1]}'"


def read_start(folder: Path) -> dict[str, Any] | None:
    """The config of the island's last start; None if there was none or the file is damaged."""
    try:
        values = json.loads((folder / START).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value has changed."""
    return [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted({**before, **now})
        if before.get(key) != now.get(key) and key.removeprefix("island.") not in IGNORED_KEYS
    ]
