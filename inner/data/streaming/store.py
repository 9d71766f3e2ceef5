"""A folder at any URL that fsspec supports (s3://, gs://, a path), from which shards are read and
to which they are written.

A store may be slow, unreachable for a while, or give wrong data. Each request has a deadline and is
repeated, with growing pauses, until the store has not answered for too long. Every fsspec backend
raises its own types of errors, so any exception except a missing file counts as no answer.
"""

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from inner.data.streaming.index import INDEX, MAX_INDEX_BYTES, ShardIndex, parse_index
from inner.errors import InputError, summarise
from inner.files import open_url, write_atomically
from inner.threads import start_thread

log = logging.getLogger(__name__)

REQUEST_SECONDS = 30.0
"""Deadline of a request in seconds. A piece of 4 MiB must come within it, which takes 1.2
Mbit/s."""
PIECE_BYTES = 1 << 22
FIRST_PAUSE_SECONDS = 0.2
LAST_PAUSE_SECONDS = 5.0
SAY_EVERY_SECONDS = 30.0
T = TypeVar("T")


class Store:
    """A store. `patience`: number of seconds without an answer after which a call raises
    InputError.
    """

    def __init__(self, url: str, patience: float) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._files, self._root = open_url(url, f"{url}: is not a folder or URL that can be read")

    @property
    def _is_local(self) -> bool:
        return "file" in (
            self._files.protocol
            if isinstance(self._files.protocol, tuple)
            else (self._files.protocol,)
        )

    def read_index(self) -> ShardIndex | None:
        """Return the index of the text in the store; None if there is none. Raises InputError if it
        is damaged.
        """
        data = self.read(INDEX, 0, MAX_INDEX_BYTES)
        return None if data is None else parse_index(data, f"{self.url}/{INDEX}")

    def read(self, name: str, start: int, stop: int) -> bytes | None:
        """Return bytes of a file, fewer if it ends before `stop`; None if the file does not
        exist.
        """
        path = str(self._root / name)

        def request() -> bytes | None:
            try:
                return self._files.cat_file(path, start=start, end=stop)
            except FileNotFoundError:
                return None
            except Exception as error:
                if "InvalidRange" in str(error) or "416" in str(
                    error
                ):  # the file ends before `start`
                    return b""
                raise

        return self._insist(request, name)

    def download(self, name: str, size: int, target: Path) -> bool:
        """Copy the first `size` bytes of a file to `target`, which exists. Return whether the file
        has exactly that size.
        """
        with target.open("r+b") as file:
            for start in range(0, size, PIECE_BYTES):
                stop = min(start + PIECE_BYTES, size)
                # Read one byte more in the last piece, to notice a file that is longer than `size`.
                piece = self.read(name, start, stop + (stop == size))
                if piece is None or len(piece) != stop - start:
                    return False
                file.write(piece)
        return True

    def write(self, name: str, data: bytes) -> None:
        """Write a file to the store, whole or not at all."""
        path = self._root / name
        if self._is_local:
            self._insist(lambda: write_atomically(Path(path), data), name)
        else:
            self._insist(lambda: self._files.pipe_file(str(path), data), name)

    def _insist(self, request: Callable[[], T], name: str) -> T:
        """Repeat a request until it is answered. Raises InputError when the store has not answered
        for too long.
        """
        began = time.monotonic()
        said_at = -SAY_EVERY_SECONDS
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return call_in_time(request, REQUEST_SECONDS)
            except PermissionError as error:
                raise InputError(
                    f"{self.url}/{name}: this island may not use it ({summarise(error)}); give it "
                    "the store's keys"
                ) from error
            except Exception as error:
                silent = time.monotonic() - began
                if silent + pause > self._patience:
                    raise InputError(
                        f"{self.url}/{name}: the store has not answered for {silent:.0f} s "
                        f"(island.shards.store_seconds: {self._patience:g}): {summarise(error)}; "
                        "check that it exists and may be used, and start the island again: it "
                        "continues from its checkpoint"
                    ) from error
                if silent - said_at >= SAY_EVERY_SECONDS:
                    said_at = silent
                    log.warning(
                        "%s/%s: no answer (%s); trying again for %.0f s",
                        self.url, name, summarise(error), self._patience - silent,
                    )  # fmt: skip
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LAST_PAUSE_SECONDS)


def call_in_time(request: Callable[[], T], seconds: float) -> T:
    """Return the result of a call. Raises TimeoutError if the call takes longer than `seconds`; it
    then continues in a thread, and its result is ignored.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, request()))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            outcome.append((False, error))

    has_ended = start_thread(run, "store request")
    has_ended.wait(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    is_good, value = outcome[0]
    if is_good:
        return value
    raise value
