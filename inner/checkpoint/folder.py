"""Checkpoint folders on disk: naming, locking, publishing, pruning and finding. No tensors; one
process uses them.

    step-00000120.partial/   being written; if the save is killed it stays, and the next save
                             removes it
    step-00000120/           published by one rename after all files are on the disk, the manifest
                             last
    step-00000120-2/         step 120, saved a second time
    step-00000080.deleted/   being deleted
    step-00000120/rejected   no loss was finite after it: nobody resumes from it, and the next save
                             deletes it
    lock                     locked by the process that may save here, and contains the name of that
                             process

manifest.py describes the manifest. Every file that the manifest names is checked against it before
use.
"""

import hashlib
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from blake3 import blake3

from inner.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileSpec,
    Manifest,
    Signer,
    Unsigned,
    parse_manifest,
    write_manifest,
)
from inner.errors import InputError
from inner.files import try_process_lock, write_synced
from inner.foreign.files import open_file, read_at_most

LOCK = "lock"
PARTIAL = ".partial"
DELETED = ".deleted"
REJECTED = "rejected"
PUBLISHED_NAME = re.compile(r"step-\d{8,}(-\d+)?")
LEFTOVER_NAME = re.compile(PUBLISHED_NAME.pattern + r"\.(partial|deleted)")
# Added for each tensor: headers, indexes and disk blocks that are not full.
OVERHEAD_BYTES = 8192

UNSIGNED = Unsigned()

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A published checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def inner_step(self) -> int:
        return self.manifest.inner_step

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts

    @property
    def is_rejected(self) -> bool:
        """Whether no loss was finite in the training that continued from this checkpoint."""
        return (self.path / REJECTED).exists()


def lock_folder(folder: Path) -> TextIO:
    """Create the folder and lock it for this process until the returned file is closed or the
    process dies.

    Raises InputError if another process holds the lock or the folder cannot be written.
    """
    with _input_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    try:
        is_locked = try_process_lock(file)
    except OSError as error:
        is_locked = True
        log.warning(
            "%s: this file system has no locks (%s); make sure that no other run saves here",
            folder,
            error.strerror,
        )
    if not is_locked:
        file.seek(0)
        holder = file.read() or "unknown"
        file.close()
        raise InputError(
            f"{folder}: another process saves checkpoints here ({holder}); give each run and "
            "island a folder of its own, or wait until that process has ended"
        )
    with _input_errors(folder):
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file


def create_partial(folder: Path, inner_step: int, num_bytes: int, num_tensors: int) -> Path:
    """Create an empty folder to write a checkpoint into, and remove the folders of saves that were
    killed.

    `num_bytes` is the size of all tensor values. Raises InputError if the disk has less than that
    free: older checkpoints are deleted only after this one is published.
    """
    with _input_errors(folder):
        for path in folder.iterdir():
            if LEFTOVER_NAME.fullmatch(path.name):
                shutil.rmtree(path)
        needed = num_bytes + OVERHEAD_BYTES * num_tensors
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise InputError(
                f"{folder}: the disk is full: a checkpoint needs about {needed} bytes, {free} are "
                "free; free some, keep fewer checkpoints, or use another folder"
            )
        path = folder / (free_name(folder, inner_step) + PARTIAL)
        path.mkdir()
        return path


def publish(partial: Path, manifest: Manifest, signer: Signer = UNSIGNED) -> None:
    """Turn the partial folder into a checkpoint by one rename. Its files must be on the disk
    already.
    """
    found = {file.name: file.stat().st_size for file in partial.iterdir()}
    written = {name: spec.size_bytes for name, spec in manifest.files.items()}
    if found != written:
        raise InputError(
            f"{partial}: ranks wrote {sorted(written)}, rank 0 sees {sorted(found)}; the folder "
            "must be on a file system that all of the island's ranks share"
        )
    folder = partial.parent
    serial = 1 + max(
        (checkpoint.manifest.serial for checkpoint in list_published(folder, signer)[0]), default=0
    )
    finish(
        partial,
        write_manifest(replace(manifest, serial=serial), signer),
        partial.name.removesuffix(PARTIAL),
    )


def finish(partial: Path, manifest: bytes, name: str) -> None:
    """Write the manifest into a partial folder whose other files are on the disk, and rename the
    folder to `name`.
    """
    write_synced(partial / MANIFEST, manifest)
    _sync_folder(partial)
    partial.rename(partial.with_name(name))
    _sync_folder(partial.parent)


def prune(folder: Path, keep: int, signer: Signer = UNSIGNED) -> None:
    """Delete the rejected checkpoints, and all others except the newest `keep`.

    Damaged and refused checkpoints are not counted and not deleted.
    """
    found = list_published(folder, signer)[0]
    kept = [checkpoint for checkpoint in found if not checkpoint.is_rejected][:keep]
    for checkpoint in [checkpoint for checkpoint in found if checkpoint not in kept]:
        # Rename first: if the process is killed during the deletion, the rest must not look like a
        # damaged checkpoint.
        doomed = checkpoint.path.with_name(checkpoint.path.name + DELETED)
        try:
            checkpoint.path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning(
                "%s: the checkpoint cannot be deleted (%s); delete it by hand, or the disk may "
                "fill up",
                checkpoint.path,
                error,
            )


def reject_since(folder: Path, inner_step: int, signer: Signer = UNSIGNED) -> list[str]:
    """Reject the checkpoints of `inner_step` and of later steps, and return their names, newest
    first.
    """
    rejected = [each for each in list_published(folder, signer)[0] if each.inner_step >= inner_step]
    with _input_errors(folder):
        for checkpoint in rejected:
            (checkpoint.path / REJECTED).touch()
    return [checkpoint.path.name for checkpoint in rejected]


def list_published(
    folder: Path, signer: Signer = UNSIGNED
) -> tuple[list[SavedCheckpoint], list[str]]:
    """Return the checkpoints whose manifest and file sizes are right, newest first, and a message
    for each damaged or refused checkpoint.
    """
    intact = []
    problems = []
    with _input_errors(folder):
        paths = sorted(folder.iterdir())
    for path in paths:
        if PUBLISHED_NAME.fullmatch(path.name):
            try:
                intact.append(SavedCheckpoint(path, _read_and_check(path, signer)))
            except InputError as problem:
                problems.append(str(problem))
    return sorted(intact, key=lambda checkpoint: checkpoint.manifest.serial, reverse=True), problems


def find_damage(checkpoint: SavedCheckpoint, names: Iterable[str]) -> str | None:
    """Return a message about the first of these files that cannot be read or has changed since it
    was written, or None.
    """
    for name in names:
        try:
            is_same = _is_as_written(checkpoint.path / name, checkpoint.manifest.files[name])
        except OSError as error:
            return f"{checkpoint.path / name}: cannot be read: {error.strerror}"
        if not is_same:
            return (
                f"{checkpoint.path / name}: damaged: its content has changed since it was written"
            )
    return None


def free_space(folder: Path) -> str:
    """Return a text with the free space of the disk, because torch reports only "unexpected pos"
    when a tensor does not fit.
    """
    try:
        return f"{shutil.disk_usage(folder).free} bytes are free"
    except OSError as error:
        return f"the folder cannot be read: {error.strerror}"


def hash_bytes(raw: bytes, spec: FileSpec) -> str:
    """Return the hash of these bytes, of the kind that `spec` has."""
    return _hash_kind(spec)(raw).hexdigest()


def _is_as_written(file: Path, spec: FileSpec) -> bool:
    with open_file(file) as stream:
        digest = hashlib.file_digest(stream, _hash_kind(spec)).hexdigest()
        return file.stat().st_size == spec.size_bytes and digest == spec.hash


def _hash_kind(spec: FileSpec) -> Callable[..., Any]:
    return blake3 if spec.blake3 else hashlib.sha256


def read_part(path: Path, most_bytes: int) -> bytes:
    """Read a file, but no more than its first `most_bytes` bytes. Raises InputError if it cannot be
    read.
    """
    try:
        with open_file(path) as file:
            return read_at_most(file, most_bytes)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _read_and_check(path: Path, signer: Signer) -> Manifest:
    """Read a checkpoint's manifest and check its file sizes. Raises InputError with the first
    problem.
    """
    manifest = parse_manifest(read_part(path / MANIFEST, MAX_MANIFEST_BYTES + 1), str(path), signer)
    for name, spec in manifest.files.items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != spec.size_bytes:
            got = "is missing" if size is None else f"has {size} bytes"
            raise InputError(f"{path / name}: damaged: it {got}, {spec.size_bytes} were written")
    return manifest


def free_name(folder: Path, inner_step: int) -> str:
    """Return the name for a new checkpoint: step-00000120, or step-00000120-2 and so on if that
    name is taken.
    """
    name = f"step-{inner_step:08d}"
    number = 1
    while (folder / name).exists():
        number += 1
        name = f"step-{inner_step:08d}-{number}"
    return name


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _input_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of the disk into an InputError that names the folder."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder}: checkpoints cannot be kept here: {error.strerror}; it must be a folder "
            "that this user may read "
            "and write, on a disk with room"
        ) from error
