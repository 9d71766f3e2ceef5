"""A joiner's parts on disk, as they come: one that is killed in the middle of its download takes only the rest.

FOLDER/part-000012     one line of JSON (see _Header), then params and momentum, raw fp32
"""

import logging
import shutil
import threading
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from pydantic import Field

from outer.errors import MessageError
from outer.rounds import MAX_ROUND, Message, parse
from outer.state import MAX_GIVEN, PartState, part_of, raw_bytes, state_bytes

log = logging.getLogger(__name__)

CHECKSUM_BYTES = 16


class _Header(Message):
    fingerprint: str
    run: str
    part: int
    round: int = Field(ge=0, lt=MAX_ROUND)
    pushes: int = Field(default=0, ge=0, lt=MAX_GIVEN)
    checksum: str
    """Of the bytes that follow."""


class PartsCache:
    """Parts of one model (a space's fingerprint) in one run (any text that tells it from others). Any thread."""

    def __init__(self, folder: Path, fingerprint: str, run: str) -> None:
        self._folder, self._fingerprint, self._run = folder, fingerprint, run
        self._is_off = False
        self._lock = threading.Lock()

    def write(self, part: int, state: PartState) -> None:
        """Keep a part, whole or not at all. After the first failure, such as a full disk, nothing more is written."""
        with self._lock:
            if not self._is_off:
                self._write(part, state)

    def read(self, part: int, num_elements: int, *, has_momentum: bool = True) -> PartState | None:
        """A part as it was written, or None when it is missing, damaged, or of another model or run."""
        try:
            line, _, raw = self._path(part).read_bytes().partition(b"\n")
            header = parse(_Header, line)
            is_ours = (header.fingerprint, header.run, header.part) == (self._fingerprint, self._run, part)
            is_whole = len(raw) == state_bytes(num_elements, has_momentum=has_momentum)
            if not is_ours or not is_whole or header.checksum != _checksum(raw):
                return None
            return part_of(raw, num_elements, header.round, header.pushes)
        except (OSError, MessageError):
            return None

    def remove(self) -> None:
        """Forget all parts: the island has entered the run, or what was taken is not sound. Idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, part: int, state: PartState) -> None:
        raw = raw_bytes(state.params) + raw_bytes(state.momentum)
        header = _Header(
            fingerprint=self._fingerprint,
            run=self._run,
            part=part,
            round=state.round,
            pushes=state.pushes,
            checksum=_checksum(raw),
        )
        path = self._path(part)
        unfinished = path.with_suffix(".unfinished")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(header.model_dump_json().encode() + b"\n" + raw)
            unfinished.replace(path)
        except OSError as error:
            self._is_off = True
            with suppress(OSError):
                unfinished.unlink()
            log.warning("the state taken is not kept on disk, a restart would take all of it anew: %s", error)

    def _path(self, part: int) -> Path:
        return self._folder / f"part-{part:06d}"


def _checksum(raw: bytes) -> str:
    return blake2b(raw, digest_size=CHECKSUM_BYTES).hexdigest()
