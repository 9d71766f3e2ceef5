"""The supply that makes shards: a separate process tokenises the text, one shard per request.

Processes that share a cache make each shard only once, because they hold a lock while making it.
The index in the folder records the shards that have been made, so any process can continue, even
after all were killed.
"""

import json
import logging
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from inner.config import DataConfig
from inner.data.lock import KeepAlive, hold_lock
from inner.data.streaming.cache import ShardCache
from inner.data.streaming.index import (
    HELDOUT,
    INDEX,
    Made,
    ShardIndex,
    parse_index,
    sha256_of,
    shard_name,
)
from inner.data.streaming.make import new_index
from inner.errors import InputError
from inner.files import write_atomically

log = logging.getLogger(__name__)

SILENT_SECONDS = 600.0
"""Number of seconds without a sign of life after which a tokeniser has failed. It gives one for
each document."""
END_SECONDS = 2.0
LOOK_SECONDS = 0.05
MAX_DEATHS = 3
"""Number of times that a tokeniser that has died is started again."""
OTHERS_SECONDS = 0.5
"""Number of seconds for which a process leaves the next shard to the process that made the last
one, whose tokeniser is already at the right place in the text."""


class TokeniserSupply:
    """Makes the shards of one source. `command` starts a process that runs `serve` of worker.py."""

    def __init__(
        self, config: DataConfig, identity: str, cache: ShardCache, command: Sequence[str]
    ) -> None:
        self._config = config
        self._cache = cache
        self._command = command
        self._folder = cache.folder / identity
        self._worker: _Worker | None = None
        self._num_deaths = 0
        self._index = self._read_index() or new_index(config, identity)

    @property
    def index(self) -> ShardIndex:
        return self._index

    @property
    def folder(self) -> Path:
        return self._folder

    def begin(self) -> None:
        if not self._index.shards:
            self.bring(0)

    def bring(self, number: int) -> None:
        while True:
            self._index = self._read_index() or self._index
            is_made = number < len(self._index.shards)
            if (is_made and (self._folder / shard_name(number)).exists()) or (
                not is_made and self._index.is_complete
            ):
                return
            self._approach(number if is_made else len(self._index.shards))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def heldout(self) -> np.ndarray:
        """Return the ids of the held-out text. A shard must have been made before."""
        heldout = self._index.heldout
        path = self._folder / HELDOUT
        assert heldout is not None, "the held-out text must be written before the first shard"
        data = path.read_bytes() if path.exists() else b""
        if sha256_of(data) != heldout.sha256:
            raise InputError(
                f"{path}: is damaged; delete {self._folder} and start the island again: it makes "
                "the text again"
            )
        return np.frombuffer(data, self._index.dtype)

    def _read_index(self) -> ShardIndex | None:
        path = self._folder / INDEX
        try:
            return parse_index(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None

    def _approach(self, number: int) -> None:
        """Make a shard, or wait a moment if another process is likely to make it."""
        stands_there = self._worker is not None and self._worker.number == number
        is_new = number == len(self._index.shards) > 0
        if is_new and not stands_there and self._age() < OTHERS_SECONDS:
            time.sleep(LOOK_SECONDS)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / shard_name(number)
        with hold_lock(self._folder / ".making.lock", f"the text in {self._folder}") as keep_alive:
            self._index = self._read_index() or self._index
            is_made = number < len(self._index.shards)
            if not (path.exists() if is_made else self._index.is_complete):
                self._make(number, path, keep_alive)

    def _age(self) -> float:
        """Return the number of seconds since the last shard was made."""
        return time.time() - (self._folder / INDEX).stat().st_mtime

    def _make(self, number: int, path: Path, keep_alive: KeepAlive) -> None:
        try:
            self._make_with_worker(number, path, keep_alive)
        except InputError as error:
            has_died = self._worker is not None and self._worker.has_died
            self.close()
            self._num_deaths += has_died
            if not has_died or self._num_deaths > MAX_DEATHS:
                raise
            log.warning("%s; it is started again", error)

    def _make_with_worker(self, number: int, path: Path, keep_alive: KeepAlive) -> None:
        if self._worker is None or self._worker.number != number:
            self.close()
            self._worker = _Worker(self._command, self._config, self._index, number)
        made = self._worker.make(keep_alive)
        if made is None:
            self._write(self._index.model_copy(update={"is_complete": True}))
            return
        record = made.record
        if number < len(self._index.shards) and record.sha256 != self._index.shards[number].sha256:
            raise InputError(
                f"data: shard {number} of the text differs from the shard that was made first: the "
                "text or the tokenizer has changed; give the run the text that it began with, or "
                f"delete {self._folder} and begin a new run"
            )
        with self._cache.place(path, record.tokens * self._index.item_bytes) as place:
            self._worker.write(place.path, self._folder / HELDOUT)
            place.keep()
        if number == len(self._index.shards):
            self._write(self._index.with_shard(made))

    def _write(self, index: ShardIndex) -> None:
        write_atomically(self._folder / INDEX, index.model_dump_json())
        self._index = index


class _Worker:
    """The process that tokenises from shard `number` on. It ends with this process."""

    def __init__(
        self, command: Sequence[str], config: DataConfig, index: ShardIndex, number: int
    ) -> None:
        self.number = number
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._unread = b""
        task = {
            "config": config.model_dump(mode="json"),
            "index": index.model_dump(mode="json"),
            "number": number,
        }
        self._say(task)

    def make(self, keep_alive: KeepAlive) -> Made | None:
        """Make the next shard and return its entries in the index; None at the end of the text.
        Raises InputError.
        """
        self._say({"ask": "make"})
        made = self._reply(keep_alive)["made"]
        return None if made is None else Made.model_validate(made)

    def write(self, path: Path, heldout: Path) -> None:
        """Write the shard that was just made to a file, and with the first shard also the held-out
        text.
        """
        self._say({"ask": "write", "path": str(path), "heldout": str(heldout)})
        self._reply(lambda: None)
        self.number += 1

    def close(self) -> None:
        """End the process. Closing its input is enough, unless it is tokenising."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # Bytes that were not yet sent to a process that has died cannot be flushed.
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None

    def _reply(self, keep_alive: KeepAlive) -> dict[str, Any]:
        while True:
            reply = json.loads(self._line())
            keep_alive()
            if "error" in reply:
                raise InputError(reply["error"])
            if "alive" not in reply:
                return reply

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(SILENT_SECONDS):
                    raise InputError(
                        f"the tokeniser process has shown no sign of life for {SILENT_SECONDS:g} "
                        "s; check the source of its text"
                    )
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._died()
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    @property
    def has_died(self) -> bool:
        return self._process.poll() is not None

    def _died(self) -> InputError:
        code = self._process.wait()
        return InputError(
            f"the tokeniser process has died (exit code {code}), perhaps for lack of memory; its "
            "output is in the log above; start the island again: finished shards stay"
        )
