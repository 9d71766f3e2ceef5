"""Checkpoints as folders on a disk: named, locked, published whole, kept, found again. Knows no tensors; one process.

    step-00000120.partial/   being written; a killed save leaves one, the next save removes it
    step-00000120/           published by one rename once all in it, the manifest last, is on the disk
    step-00000120-2/         step 120 saved again
    step-00000080.deleted/   being deleted
    lock                     held while a process may save here; says which

The manifest holds each file's size and hash, so a cut or flipped file is found before it is loaded. That guards
against accidents, not against people: who can write to the folder can make a manifest, too.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from inner.errors import InputError

FORMAT = 1
MANIFEST = "manifest.json"
LOCK = "lock"
PARTIAL = ".partial"
DELETED = ".deleted"
PUBLISHED_NAME = re.compile(r"step-\d{8,}(-\d+)?")
LEFT_OVER_NAME = re.compile(PUBLISHED_NAME.pattern + r"\.(partial|deleted)")
# What headers, indexes and the disk's blocks add to the values, for each tensor.
OVERHEAD_BYTES = 8192

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileSpec:
    """What a file must be."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Contents:
    """What a manifest says."""

    inner_step: int
    facts: dict[str, Any]
    """What the caller of save() wanted to know again, JSON."""
    optimizers: dict[str, str]
    """The class of the optimizer that steps each parameter."""
    files: dict[str, FileSpec] = field(default_factory=dict)
    serial: int = 0
    """Counts the saves into the folder. Not the step: a run may go back to an older one and go on from there."""


@dataclass(frozen=True)
class Found:
    """A published checkpoint."""

    path: Path
    contents: Contents

    @property
    def inner_step(self) -> int:
        return self.contents.inner_step

    @property
    def facts(self) -> dict[str, Any]:
        return self.contents.facts


def lock(folder: Path) -> TextIO:
    """Makes the folder and holds it for this process until the result is closed or the process dies.

    Raises InputError if another process holds it or it cannot be written.
    """
    with _problems_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    try:
        # Not flock: its locks go on in forked children, which may outlive a killed parent.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read() or "unknown"
        file.close()
        raise InputError(
            f"{folder}: another process saves checkpoints here ({holder}); give each run and island a folder of its "
            "own, or wait until that process has ended"
        ) from None
    except OSError as error:
        log.warning("%s: this file system has no locks (%s); see that no other run saves here", folder, error.strerror)
    with _problems_named(folder):
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file


def start(folder: Path, inner_step: int, num_bytes: int, num_tensors: int) -> Path:
    """An empty folder to write a checkpoint into. Removes what killed saves left. Raises InputError.

    `num_bytes`: of the values; the disk must have as much free, for the old checkpoints stay until this one is whole.
    """
    with _problems_named(folder):
        _remove_left_over(folder)
        needed = num_bytes + OVERHEAD_BYTES * num_tensors
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise InputError(
                f"{folder}: the disk is full: a checkpoint needs about {needed} bytes, {free} are free; free some, "
                "keep fewer checkpoints, or use another folder"
            )
        path = folder / (free_name(folder, inner_step) + PARTIAL)
        path.mkdir()
        return path


def publish(partial: Path, contents: Contents) -> None:
    """Makes the written files a checkpoint, all at once. Each of them must be on the disk already."""
    here = {file.name: file.stat().st_size for file in partial.iterdir()}
    written = {name: spec.size_bytes for name, spec in contents.files.items()}
    if here != written:
        raise InputError(
            f"{partial}: ranks wrote {sorted(written)}, rank 0 sees {sorted(here)}; the folder must be on a file "
            "system that all of the island's ranks share"
        )
    folder = partial.parent
    serial = 1 + max((found.contents.serial for found in published(folder)[0]), default=0)
    _write_manifest(partial / MANIFEST, replace(contents, serial=serial))
    _sync_folder(partial)
    partial.rename(partial.with_name(partial.name.removesuffix(PARTIAL)))
    _sync_folder(folder)


def prune(folder: Path, keep: int) -> None:
    """Deletes all checkpoints but the `keep` newest. Damaged ones neither count nor go: look at them first."""
    for found in published(folder)[0][keep:]:
        # Renamed first: a kill while it is deleted must not leave something that looks damaged.
        doomed = found.path.with_name(found.path.name + DELETED)
        try:
            found.path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("%s: cannot be deleted (%s); the disk may fill up", found.path, error)


def published(folder: Path) -> tuple[list[Found], list[str]]:
    """The checkpoints whose manifest and file sizes are right, newest first, and what is wrong with the others."""
    whole, problems = [], []
    with _problems_named(folder):
        paths = sorted(folder.iterdir())
    for path in paths:
        if PUBLISHED_NAME.fullmatch(path.name):
            try:
                whole.append(Found(path, _checked(path)))
            except InputError as problem:
                problems.append(str(problem))
    return sorted(whole, key=lambda found: found.contents.serial, reverse=True), problems


def measure(path: Path, patterns: Iterable[str]) -> dict[str, FileSpec]:
    """Sizes and hashes, as they are now, of the files whose names match."""
    return {file.name: _spec(file) for pattern in patterns for file in path.glob(pattern)}


def find_damage(found: Found, names: Iterable[str]) -> str | None:
    """What is wrong with the first of these files that is not as it was written."""
    for name in names:
        try:
            is_same = _spec(found.path / name) == found.contents.files[name]
        except OSError as error:
            return f"{found.path / name}: cannot be read: {error.strerror}"
        if not is_same:
            return f"{found.path / name}: damaged: its bytes are not those that were written"
    return None


def room(folder: Path) -> str:
    """How full the disk is; torch says but "unexpected pos" when a tensor does not fit."""
    try:
        return f"{shutil.disk_usage(folder).free} bytes are free"
    except OSError as error:
        return f"the folder cannot be read: {error.strerror}"


def _spec(file: Path) -> FileSpec:
    with file.open("rb") as stream:
        return FileSpec(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def _write_manifest(file: Path, contents: Contents) -> None:
    text = json.dumps({"format": FORMAT, **asdict(contents)}, indent=1, sort_keys=True, allow_nan=False)
    with file.open("w") as stream:
        # The hash of the lines that follow is the first line.
        stream.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(raw: bytes, path: str) -> Contents:
    """What the manifest of the checkpoint `path` says. Raises InputError that says what is wrong with it."""
    digest, _, text = raw.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise InputError(f"{path}/{MANIFEST}: damaged: its bytes are not those that were written")
    values = json.loads(text)
    if (got := values.pop("format")) != FORMAT:
        raise InputError(
            f"{path}: written in format {got}, this version reads format {FORMAT}; use the version it is from"
        )
    return Contents(**values | {"files": {name: FileSpec(**spec) for name, spec in values["files"].items()}})


def _checked(path: Path) -> Contents:
    """What a checkpoint holds, its manifest and file sizes checked. Raises InputError that says what is wrong."""
    try:
        contents = read_manifest((path / MANIFEST).read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path / MANIFEST}: cannot be read: {error.strerror}") from None
    for name, spec in contents.files.items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != spec.size_bytes:
            got = "is missing" if size is None else f"has {size} bytes"
            raise InputError(f"{path / name}: damaged: it {got}, {spec.size_bytes} were written")
    return contents


def free_name(folder: Path, inner_step: int) -> str:
    """step-00000120, or with the first free number behind it."""
    name = f"step-{inner_step:08d}"
    number = 1
    while (folder / name).exists():
        number += 1
        name = f"step-{inner_step:08d}-{number}"
    return name


def _remove_left_over(folder: Path) -> None:
    for path in folder.iterdir():
        if LEFT_OVER_NAME.fullmatch(path.name):
            shutil.rmtree(path)


def _sync_folder(folder: Path) -> None:
    """Brings the folder's entries onto the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _problems_named(folder: Path) -> Iterator[None]:
    """Turns what the disk says into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder}: checkpoints cannot be kept here: {error.strerror}; it must be a folder that this user may read "
            "and write, on a disk with room"
        ) from error
