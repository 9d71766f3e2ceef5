"""The inputs of each group that are kept: those that together reach all that any input has
reached.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
SEED_BYTES = 6000
"""libFuzzer makes no longer inputs, so that it makes many."""
MOST_KEPT_BYTES = 150_000
"""Of one group, compressed."""


def kept_inputs(group: str) -> list[bytes]:
    """The inputs of a group that are kept."""
    path = _archive(group)
    if not path.exists():
        return []
    with tarfile.open(path) as archive:
        files = [archive.extractfile(member) for member in archive.getmembers()]
        return [file.read() for file in files if file is not None]


def write_kept(group: str, inputs: Iterable[bytes]) -> int:
    """Keep these inputs, the shortest first, as many as there is room for. Returns how many."""
    ordered = sorted(inputs, key=lambda data: (len(data), data))
    while len(raw := _pack(ordered)) > MOST_KEPT_BYTES:
        ordered = ordered[: len(ordered) * 9 // 10]
    CORPUS.mkdir(exist_ok=True)
    _archive(group).write_bytes(raw)
    return len(ordered)


def write_inputs(folder: Path, inputs: Iterable[bytes]) -> None:
    """Write inputs into a folder, each under its hash as libFuzzer does."""
    for data in inputs:
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


def _archive(group: str) -> Path:
    return CORPUS / f"{group}.tar.xz"


def _pack(inputs: list[bytes]) -> bytes:
    """A compressed archive, the same for the same inputs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for data in inputs:
            member = tarfile.TarInfo(hashlib.sha1(data).hexdigest())
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
