"""Downloaded parts on disk. A joiner that is killed during its download fetches only the missing
parts after a restart.
"""

import logging
import shutil
import threading
from hashlib import blake2b
from pathlib import Path

from pydantic import Field

from outer.errors import MessageError
from outer.identity.files import write_atomically
from outer.network.messages import MAX_ROUND, Message, PartNumber, parse
from outer.state.part_state import MAX_GIVEN, PartState, part_of, raw_bytes, state_bytes

log = logging.getLogger(__name__)


class _Header(Message):
    """The line of JSON in a file FOLDER/part-000012. Params and momentum follow it, in raw fp32."""

    fingerprint: str = Field(max_length=64)
    run: str = Field(max_length=256)
    part: PartNumber
    round: int = Field(ge=0, lt=MAX_ROUND)
    pushes: int = Field(default=0, ge=0, lt=MAX_GIVEN)
    checksum: str = Field(max_length=64)
    """Checksum of the bytes that follow the header."""


class PartsCache:
    """Cache for the parts of the space with this fingerprint in one run. Any thread may use it."""

    def __init__(self, folder: Path, fingerprint: str, run: str) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._run = run
        self._has_failed = False
        self._lock = threading.Lock()

    def write(self, part: int, state: PartState) -> None:
        """Write a part atomically. After the first failure, such as a full disk, nothing more is
        written.
        """
        raw = raw_bytes(state.params) + raw_bytes(state.momentum)
        header = self._build_header(part, state.round, state.pushes, raw)
        path = self._folder / f"part-{part:06d}"
        with self._lock:
            if self._has_failed:
                return
            try:
                write_atomically(path, header.encode() + b"\n" + raw)
            except OSError as error:
                self._has_failed = True
                log.warning(
                    "the downloaded state is not kept on disk, so a restart would download all of "
                    "it again: %s",
                    error,
                )

    def read(self, part: int, num_elements: int, *, has_momentum: bool = True) -> PartState | None:
        """Read a part. Return None if it is missing, damaged, or belongs to another model or
        run.
        """
        try:
            line, _, raw = (self._folder / f"part-{part:06d}").read_bytes().partition(b"\n")
            header = parse(_Header, line)
            is_whole = len(raw) == state_bytes(num_elements, has_momentum=has_momentum)
            if not is_whole or header != self._build_header(part, header.round, header.pushes, raw):
                return None
            return part_of(raw, num_elements, header.round, header.pushes)
        except (OSError, MessageError):
            return None

    def remove(self) -> None:
        """Delete all parts, because the island has entered the run or the parts are not valid.
        Idempotent.
        """
        shutil.rmtree(self._folder, ignore_errors=True)

    def _build_header(self, part: int, number: int, pushes: int, raw: bytes) -> _Header:
        owner = {"fingerprint": self._fingerprint, "run": self._run}
        checksum = blake2b(raw, digest_size=16).hexdigest()
        return _Header(part=part, round=number, pushes=pushes, checksum=checksum, **owner)
