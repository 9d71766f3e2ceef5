"""Text inside other files: compressed JSON Lines and tar archives."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from inner.data.sources.documents import TextField
from inner.data.sources.files import FilesSource
from inner.errors import InputError

ROWS = [f"row {number} \u00e9" for number in range(500)]
LINES = "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()


def compress_zstd(data: bytes) -> bytes:
    """Two frames one after the other, as programs that compress in parallel write them."""
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": compress_zstd}


def read(path: Path) -> dict[str, str]:
    return {document.key: document.text for document in FilesSource((str(path),), TextField("text")).documents()}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_lines_give_a_document_per_row(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESSORS[suffix](LINES))
    assert read(path) == {f"{path.name}#{number}": row for number, row in enumerate(ROWS)}
    shares = [document.share or 0.0 for document in FilesSource((str(path),), TextField("text")).documents()]
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_damaged_compressed_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    whole = COMPRESSORS[suffix](LINES)
    path.write_bytes(whole[: len(whole) // 3] + b"\xff" * 40 + whole[len(whole) // 3 + 40 :])
    with pytest.raises(InputError, match=f"a.jsonl{suffix}"):
        read(path)


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("name, mode", [("a.tar", "w"), ("a.tar.gz", "w:gz")])
def test_an_archive_gives_a_document_per_text_member(tmp_path: Path, name: str, mode: str) -> None:
    members = {"0.txt": b"plain", "0.jpg": b"\xff\xd8", "1.json": b'{"text": "of a field", "n": 1}'}
    write_tar(tmp_path / name, members, mode)
    assert read(tmp_path / name) == {f"{name}#0.txt": "plain", f"{name}#1.json": "of a field"}


@pytest.mark.parametrize(
    "data, text",
    [(b"no archive", "cannot be read as tar"), (None, "member 0.json: is not UTF-8 text or JSON")],
)
def test_a_broken_archive_is_named(tmp_path: Path, data: bytes | None, text: str) -> None:
    if data is None:
        write_tar(tmp_path / "a.tar", {"0.json": b"{"})
    else:
        (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(InputError, match=text):
        read(tmp_path / "a.tar")
