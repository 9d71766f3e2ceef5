"""The Protocol of a supply of shards, and the supply from a store. tokeniser.py has the supply that
makes them.
"""

import logging
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from inner.data.lock import hold_lock
from inner.data.streaming.cache import ShardCache
from inner.data.streaming.index import HELDOUT, ShardIndex, sha256_of, shard_name
from inner.data.streaming.store import Store
from inner.errors import InputError
from inner.files import write_atomically

log = logging.getLogger(__name__)

NUM_TRIES = 3
"""Number of times that a file is fetched if its content differs from the index."""
POLL_SECONDS = 0.5
NUM_LOCKS = 8
"""Number of shards of one text that the processes of one machine can fetch at the same time."""


class Supply(Protocol):
    """Brings the shards of one text into a folder of the cache."""

    @property
    def index(self) -> ShardIndex:
        """The index of the shards that are known so far."""
        ...

    @property
    def folder(self) -> Path:
        """The folder in the cache with the shards of this text."""
        ...

    def begin(self) -> None:
        """Return once the index has a shard, or the text is known to be empty. Raises InputError
        like `bring`.
        """
        ...

    def bring(self, number: int) -> None:
        """Return once shard `number` is in the folder, or the text is known to end before it.

        Must be called from one thread at a time. Raises InputError if the shard is damaged or does
        not come in time.
        """
        ...

    def close(self) -> None: ...


class StoreSupply:
    """Fetches shards from a store, where they may still be being written. Each must agree with the
    index.
    """

    def __init__(self, store: Store, cache: ShardCache, patience: float) -> None:
        self._store = store
        self._cache = cache
        self._patience = patience
        self._index: ShardIndex | None = None
        self._grown_at = time.monotonic()

    @property
    def index(self) -> ShardIndex:
        assert self._index is not None, "begin reads it"
        return self._index

    @property
    def folder(self) -> Path:
        return self._cache.folder / self.index.identity

    def begin(self) -> None:
        self._look_for(0)

    def bring(self, number: int) -> None:
        self._look_for(number)
        if number >= len(self.index.shards):
            return
        path = self.folder / shard_name(number)
        if path.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(self.folder / f".fetch-{number % NUM_LOCKS}.lock", str(path)):
            if not path.exists():
                self._fetch(number, path)

    def close(self) -> None:
        pass

    def heldout(self) -> np.ndarray:
        """Return the ids of the held-out text. Raises InputError."""
        heldout = self.index.heldout
        path = self.folder / HELDOUT
        assert heldout is not None, "the held-out text must be written before the first shard"
        size = heldout.tokens * self.index.item_bytes
        for _ in range(NUM_TRIES):
            data = (
                path.read_bytes()
                if path.exists()
                else self._store.read(HELDOUT, 0, size + 1) or b""
            )
            if len(data) == size and sha256_of(data) == heldout.sha256:
                write_atomically(path, data)
                return np.frombuffer(data, self.index.dtype)
            path.unlink(missing_ok=True)
        raise self._damage(HELDOUT)

    def _look_for(self, number: int) -> None:
        """Return once the index has this shard, or the text is known to end before it."""
        while self._index is None or number >= len(self._index.shards):
            if self._index is not None and self._index.is_complete:
                return
            if not self._look():
                self._wait(number)

    def _look(self) -> bool:
        """Read the index again and return whether it has grown. Raises InputError if it contradicts
        the index read before.
        """
        found = self._store.read_index()
        if found is None or found == self._index:
            return False
        if self._index is not None and not found.extends(self._index):
            if self._index.extends(found):
                return False  # An older copy, which a store of several machines may return.
            raise InputError(
                f"{self._store.url}: its index does not continue the index that it had before; "
                "somebody has written another text there: give each text a place of its own, and "
                "restart the run, from a checkpoint or not"
            )
        if not found.shards and not found.is_complete:
            return False
        self._index = found
        self._grown_at = time.monotonic()
        return True

    def _wait(self, number: int) -> None:
        waited = time.monotonic() - self._grown_at
        if waited > self._patience:
            has = (
                "no index.json"
                if self._index is None
                else f"only {len(self._index.shards)} shards, unfinished,"
            )
            raise InputError(
                f"{self._store.url}: it has had {has} for {waited:.0f} s "
                "(island.shards.store_seconds: "
                f"{self._patience:g}), but shard {number} is needed; make sure that `diloco "
                "prepare --into` runs, and start the island again"
            )
        time.sleep(POLL_SECONDS)

    def _fetch(self, number: int, path: Path) -> None:
        record = self.index.shards[number]
        name = shard_name(number)
        size = record.tokens * self.index.item_bytes
        for attempt in range(NUM_TRIES):
            with self._cache.place(path, size) as place:
                if (
                    self._store.download(name, size, place.path)
                    and sha256_of(place.path.read_bytes()) == record.sha256
                ):
                    place.keep()
                    return
            log.warning(
                "%s/%s: does not agree with its index (try %d)", self._store.url, name, attempt + 1
            )
            time.sleep(POLL_SECONDS)
        raise self._damage(name)

    def _damage(self, name: str) -> InputError:
        return InputError(
            f"{self._store.url}/{name}: it is missing or damaged: after {NUM_TRIES} tries its "
            "SHA-256 still differs from the index; delete it and write it again with `diloco "
            f"prepare CONFIG --into {self._store.url} --repair`"
        )
