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
    return b"".join(
        zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])
    )


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": compress_zstd}


def read(path: Path) -> dict[str, str]:
    return {
        document.key: document.text
        for document in FilesSource((str(path),), TextField("text")).documents()
    }


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_lines_give_a_document_per_row(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESSORS[suffix](LINES))
    assert read(path) == {f"{path.name}#{number}": row for number, row in enumerate(ROWS)}
    shares = [
        document.share or 0.0
        for document in FilesSource((str(path),), TextField("text")).documents()
    ]
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_damaged_compressed_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    whole = COMPRESSORS[suffix](LINES)
    path.write_bytes(whole[: len(whole) // 3] + b"\xff" * 40 + whole[len(whole) // 3 + 40 :])
    with pytest.raises(InputError, match=f"a.jsonl{suffix}"):
        read(path)


FORMS: dict[str, Callable[[bytes], bytes]] = {
    "a.jsonl.gz": gzip.compress,
    "a.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "a.txt.gz": gzip.compress,
    "a.txt.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "a.json.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_compressed_file_that_is_cut_off_anywhere_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = FORMS[name](LINES) + FORMS[name](LINES)
    second = len(whole) // 2
    for size in (
        0,
        1,
        3,
        9,
        second // 2,
        second - 1,
        second + 1,
        second + 9,
        len(whole) - 4,
        len(whole) - 1,
    ):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=f"{name}: cannot be decompressed"):
            read(path)


@pytest.mark.parametrize("name", FORMS)
def test_a_compressed_file_with_something_else_behind_it_is_named(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(FORMS[name](LINES) + b"something else")
    with pytest.raises(InputError, match=f"{name}: cannot be decompressed"):
        read(path)


@pytest.mark.parametrize("name", [name for name in FORMS if "jsonl" in name])
def test_compressed_files_one_after_the_other_are_read_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(
        b"".join(FORMS[name](part) for part in (LINES[:1000], b"", LINES[1000:], LINES))
    )
    assert list(read(path).values()) == ROWS * 2


def test_zstd_with_skippable_frames_is_read(tmp_path: Path) -> None:
    skippable = bytes.fromhex("502a4d18 05000000") + b"aside"
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(skippable + zstandard.ZstdCompressor().compress(LINES) + skippable)
    assert list(read(path).values()) == ROWS


def test_zstd_with_the_longest_window_is_read(tmp_path: Path) -> None:
    # A frame without the size of its content, of a window of 2 GiB, with one last block of plain
    # bytes.
    header = bytes.fromhex("28b52ffd 00 a8")
    block = (len(LINES) << 3 | 1).to_bytes(3, "little") + LINES
    (tmp_path / "a.jsonl.zst").write_bytes(header + block)
    assert list(read(tmp_path / "a.jsonl.zst").values()) == ROWS


def test_zstd_that_grows_much_is_read(tmp_path: Path) -> None:
    text = "a" * 50_000_000
    (tmp_path / "a.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    assert read(tmp_path / "a.txt.zst") == {"a.txt.zst": text}


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


MEMBERS = {f"{number}.txt": f"text {number}".encode() * 100 for number in range(6)}


@pytest.mark.parametrize("name, mode", [("a.tar", "w"), ("a.tar.gz", "w:gz")])
def test_an_archive_that_is_cut_off_anywhere_is_named(tmp_path: Path, name: str, mode: str) -> None:
    path = tmp_path / name
    write_tar(path, MEMBERS, mode)
    whole = path.read_bytes()
    # A member takes a header and two blocks: 1536 is between two members, and 9216 behind the last
    # one.
    for size in (
        [1, 100, 512, 700, 1536, 1600, 3072, 9216]
        if mode == "w"
        else [1, 20, len(whole) // 2, len(whole) - 1]
    ):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=f"{name}: cannot be read as tar"):
            read(path)


def test_an_archive_with_a_damaged_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, MEMBERS)
    whole = bytearray(path.read_bytes())
    whole[3 * 1536 + 5] ^= 1
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"a.tar: cannot be read as tar .*damaged"):
        read(path)


@pytest.mark.parametrize("name, mode", [("a.tar", "w"), ("a.tar.gz", "w:gz")])
def test_archives_one_after_the_other_are_read_whole(tmp_path: Path, name: str, mode: str) -> None:
    path = tmp_path / name
    write_tar(path, {"first.txt": b"one"}, mode)
    first = path.read_bytes()
    write_tar(path, MEMBERS, mode)
    path.write_bytes(first + path.read_bytes())
    assert list(read(path).values()) == ["one", *(data.decode() for data in MEMBERS.values())]
