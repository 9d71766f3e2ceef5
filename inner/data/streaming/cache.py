"""Shards on this island's disk, up to a limit: the shards that were read least recently are deleted
to make room.

Several processes and texts share a folder. A process holds a lock on each shard that it reads. The
lock ends with the process, and a shard without a lock may be deleted at any time.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from inner.data.streaming.index import is_shard_name, sha256_of
from inner.errors import InputError
from inner.files import take_space, try_lock, wait_for_lock

log = logging.getLogger(__name__)

MAKING = ".part"
LOCK = ".room.lock"


@dataclass(frozen=True)
class OpenShard:
    """A shard that is mapped into memory. It stays on the disk until `close`."""

    ids: np.ndarray
    file: IO[bytes]

    def close(self) -> None:
        self.file.close()


class ShardCache:
    """The folder of all shards of an island. `limit`: number of bytes that they may take; None: no
    limit.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.folder = folder
        self._limit = limit

    def require_room(self, num_bytes: int, what: str) -> None:
        """Raise InputError if the limit is below `num_bytes`, which `what` needs at once."""
        if self._limit is not None and self._limit < num_bytes:
            raise InputError(
                f"island.shards.cache_gb: got {self._limit / 1e9:g}, and {what} needs "
                f"{num_bytes / 1e9:.3g}; raise it, "
                "or lower data.shard_tokens (for prepared text: prepare it again with fewer) or "
                "island.shards.ahead"
            )

    def open(self, path: Path, dtype: str, sha256: str) -> OpenShard | None:
        """Map a shard and mark it as just read; None if it is not here. A damaged shard is
        deleted.
        """
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        if not try_lock(file, shared=True) or not _is_same(file, path):
            # Another process is deleting the shard at this moment.
            file.close()
            return None
        ids = (
            np.memmap(path, dtype=dtype, mode="r")
            if os.fstat(file.fileno()).st_size
            else np.empty(0, dtype)
        )
        if sha256_of(ids.data) != sha256:
            log.warning(
                "%s is damaged on this disk; it is deleted, and fetched or tokenised again", path
            )
            path.unlink(missing_ok=True)
            file.close()
            return None
        os.utime(path)
        return OpenShard(ids, file)

    @contextmanager
    def place(self, path: Path, size: int) -> "Iterator[NewShard]":
        """Make room for a new shard. It is deleted at the end of the block unless its `keep` has
        been called.

        Raises InputError if the disk is full, or if the limit is reached by shards that processes
        are reading.
        """
        new = NewShard(path.with_name(f".{path.name}.{os.getpid()}{MAKING}"), path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._begin(new.path, size):
                yield new
        except OSError as error:
            raise _explain(path, error) from error
        finally:
            new.path.unlink(missing_ok=True)

    def _begin(self, path: Path, size: int) -> IO[bytes]:
        """Make room, create the file of a new shard, lock it and reserve its space. Only one
        process and thread does so at a time.

        A file without a lock would be treated as left behind by a process that has died.
        """
        with (self.folder / LOCK).open("a") as lock:
            wait_for_lock(lock)
            self._make_room(size)
            file = path.open("wb")
            try:
                try_lock(file)
                take_space(file, size)
            except OSError:
                file.close()
                raise
            return file

    def _make_room(self, size: int) -> None:
        used = self._shards()
        total = sum(shard.size for shard in used)
        for shard in [shard for shard in used if shard.path.name.endswith(MAKING)]:
            # If nobody holds the file's lock, the process that was writing it has died.
            total -= shard.size if _delete_if_free(shard.path) else 0
        for shard in used:
            if self._limit is None or total + size <= self._limit:
                return
            if _delete_if_free(shard.path):
                total -= shard.size
        if self._limit is not None and total + size > self._limit:
            raise InputError(
                f"{self.folder}: its shards may take {self._limit / 1e9:g} GB "
                f"(island.shards.cache_gb), and processes are reading {total / 1e9:.3g} GB of them "
                "now; raise it, or give each island of this machine an island.cache_dir of its own"
            )

    def _shards(self) -> "list[_Stored]":
        """Return all shards, also unfinished ones, with the least recently read first."""
        found = []
        for path in self.folder.glob("*/*"):
            if is_shard_name(path.name) or path.name.endswith(MAKING):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    found.append(_Stored(stat.st_mtime_ns, stat.st_size, path))
        return sorted(found, key=lambda shard: shard.read_at)


@dataclass(frozen=True)
class NewShard:
    """A shard that is being written."""

    path: Path
    """The path to write the shard to."""
    final: Path

    def keep(self) -> None:
        """Give the shard its final name, because it is complete."""
        self.path.rename(self.final)


def _explain(path: Path, error: OSError) -> InputError:
    cure = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to the disk"
    return InputError(
        f"{path}: cannot write ({error.strerror}); {cure}, set island.shards.cache_gb to less than "
        "the disk has, or island.cache_dir to another disk, and start the island again: it "
        "continues from its checkpoint"
    )


@dataclass(frozen=True)
class _Stored:
    read_at: int
    size: int
    path: Path


def _delete_if_free(path: Path) -> bool:
    """Delete a shard that no process reads or writes. Return whether it is gone."""
    try:
        with path.open("rb") as file:
            if not try_lock(file):
                return False
            path.unlink()
    except FileNotFoundError:
        pass
    return True


def _is_same(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
