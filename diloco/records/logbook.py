"""RUN_DIR/LOGBOOK.md: a run's story for its operators, a line an entry, whoever writes it."""

import fcntl
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

from diloco.config import IslandConfig, RunConfig, flatten
from diloco.runfiles import write_atomically
from diloco.units import one_line
from inner.mesh import resolve_degrees

log = logging.getLogger(__name__)

LOGBOOK = "LOGBOOK.md"
START = "start.json"
"""In an island's folder: the config that it was started with last."""
MAX_CHARACTERS = 600
TAIL_BYTES = 1 << 16
PACKAGES = ("torch", "hivemind")
ENDS = ("left", "hung", "failed", "stopped")
"""Names of entries that say how a life ended."""
UNTOLD = ("bootstrap", "faults", "joins", "index")
"""Keys of an island's config that launchers set anew at each start."""


class Logbook:
    """What one island has to tell. Several islands, of one machine or of several with one file system, may write."""

    def __init__(self, run_dir: Path, island: str) -> None:
        self.path = run_dir / LOGBOOK
        self.island = island

    def note(self, name: str, text: str) -> None:
        """Append an entry: a whole line, while no other process writes. What cannot be written is logged."""
        entry = f"- {datetime.now(UTC):%Y-%m-%d %H:%M:%SZ} **{self.island}** {one_line(f'{name}: {text}')}"
        if len(entry) > MAX_CHARACTERS:
            entry = entry[: MAX_CHARACTERS - 3] + "..."
        try:
            self._append(entry)
        except OSError as error:
            log.warning("%s: no entry was written (%s): %s", self.path, error.strerror, entry)

    def started(self, run: RunConfig, island: IslandConfig) -> None:
        """Note a start: with what, why it was needed if it is not the first, and what is configured differently."""
        config = flatten({**run.model_dump(mode="json"), "island": island.model_dump(mode="json")})
        mesh, restarts = resolve_degrees(island.mesh, island.ranks), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        life, known = self.last_life(), read_start(self.path.parent / self.island)
        name = "started" if known is None else "started again"
        by = "" if restarts == "0" else f", torchrun's restart {restarts}"
        self.note(name, f"config {run.hash}, {mesh}, on {socket.gethostname()}, {versions()}{by}")
        if known is not None:
            if life:
                self.note("cause", end_of_life(life))
            for change in differences(known, config):
                self.note("config changed", change)
        write_atomically(self.path.parent / self.island / START, json.dumps(config, indent=1) + "\n")

    def _append(self, entry: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size == 0:
                file.write(f"# Logbook of {self.path.parent.name}\n\n")
            file.write(entry + "\n")

    def last_life(self) -> list[str]:
        """What this island has noted since its last start, without its name; [] when there is nothing lately."""
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


def end_of_life(life: Sequence[str]) -> str:
    """Why the life ended that has noted this."""
    # The first: when one rank has failed, the others are stopped.
    end = next((entry for entry in life if entry.split(":", 1)[0] in ENDS), None)
    if end is not None:
        return f"its last life ended with '{end}'"
    return f"its last life ended without a word (killed, or its machine went); the last it noted was '{life[-1]}'"


def read_start(folder: Path) -> dict[str, Any] | None:
    """The config that the island was started with last; None when it was not, or the file is damaged."""
    try:
        values = json.loads((folder / START).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each key that has another value now."""
    return [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted({**before, **now})
        if before.get(key) != now.get(key) and key.removeprefix("island.") not in UNTOLD
    ]


def versions() -> str:
    """Of what decides how an island computes and speaks."""
    return f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in PACKAGES)
