"""What is no file, and what is larger or deeper than a file of its kind is, is refused by name
before it is read.
"""

import gzip
import io
import json
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
import zstandard

from diloco.checkpoints.mirror import Mirror
from diloco.config.from_swarm import parse_swarm_config
from diloco.config.overrides import apply_override
from diloco.config.schema import parse_config
from diloco.errors import ConfigError
from inner.checkpoint.folder import find_damage, list_published
from inner.checkpoint.manifest import INDEX, MANIFEST
from inner.data.sources.documents import TextField
from inner.data.sources.files import FilesSource
from inner.data.token_files.open_files import open_token_files
from inner.errors import InputError, refused
from inner.foreign.files import MAX_DOCUMENT_BYTES
from tests.foreign.readers import READERS
from tests.memory import read_status, reset_peak

GIB = 1 << 30
JSON_START = b'{"text": "'


def texts(path: Path, name: str = "text") -> list[str]:
    return [document.text for document in FilesSource((str(path),), TextField(name)).documents()]


def gzip_of(start: bytes, num_bytes: int) -> bytes:
    """A small file that is `start` and so many bytes "a" when it is decompressed: members that
    repeat.
    """
    mib = gzip.compress(b"a" * (1 << 20), 1)
    return gzip.compress(start) + mib * (num_bytes >> 20)


def zstd_of(start: bytes, num_bytes: int) -> bytes:
    mib = zstandard.compress(b"a" * (1 << 20), 1)
    return zstandard.compress(start) + mib * (num_bytes >> 20)


@pytest.mark.parametrize(
    "error", [RecursionError, TypeError, MemoryError, OSError, AssertionError, KeyError]
)
def test_whatever_breaks_at_a_foreign_file_names_it(error: type[Exception]) -> None:
    with (
        pytest.raises(InputError, match=rf"a\.x: cannot be read: {error.__name__}.*remove it"),
        refused("a.x: cannot be read"),
    ):
        raise error("cause")


def test_a_panic_of_rust_names_the_file(tmp_path: Path) -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(InputError, match=r"a\.x: PanicException: cause"), refused("a.x"):
        raise panic("cause")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), refused("a.x"):
        raise error


PIPES = [
    "config.json", "header of safetensors", "safetensors", "index of safetensors", "manifest",
    "index of a checkpoint",
    "state of an own loop", "tokenizer.json", "jsonl", "jsonl.gz", "tar", "parquet", "npy",
    "megatron", "datatrove",
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PIPES)
def test_a_fifo_in_place_of_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    reader = READERS["safetensors" if name == "header of safetensors" else name]
    path = reader.prepare(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(reader.error):
        READS_WITHOUT_WRITING.get(name, reader.read)(path)


def _read_checkpoint(path: Path) -> None:
    found, problems = list_published(path.parent.parent)
    problem = problems[0] if problems else find_damage(found[0], [path.name])
    raise InputError(problem or "it was read")


READS_WITHOUT_WRITING: dict[str, Callable[[Path], object]] = {
    "manifest": _read_checkpoint,
    "index of a checkpoint": _read_checkpoint,
    "pickled index of a checkpoint": _read_checkpoint,
}
"""The other way to read these writes the file first."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", [MANIFEST, INDEX])
def test_a_fifo_in_a_mirror_is_refused_at_once(tmp_path: Path, place: str) -> None:
    path = READERS["index of a checkpoint"].prepare(tmp_path / "there").with_name(place)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(
        InputError, match=f"{place} is a other, and a copy has files only|has 0 bytes"
    ):
        Mirror(str(path.parent.parent), keep=1).pull(tmp_path / "here")


def test_a_fifo_named_as_text_is_refused_by_name_and_passed_over_in_a_folder(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(InputError, match=r"a.txt' is a FIFO, a device or a socket"):
        texts(tmp_path / "a.txt")
    assert texts(tmp_path) == ["b"]


def test_a_manifest_with_wrong_items_by_the_thousand_is_refused_at_the_first(
    tmp_path: Path,
) -> None:
    reader = READERS["manifest"]
    path = reader.prepare(tmp_path)
    values = json.loads(path.read_bytes())
    for key, reason in (("optimizers", "text expected"), ("files", "at most 65536")):
        path.write_text(
            json.dumps({**values, key: {f"rank-{number}.tensors": 1 for number in range(70_000)}})
        )
        reset_peak()
        before = read_status("VmRSS")
        with pytest.raises(InputError, match=f"manifest.json: not a manifest: {key}: .*{reason}"):
            reader.read(path)
        assert read_status("VmHWM") - before < 60_000_000, "pydantic takes more for as many errors"


def test_a_file_of_text_that_is_longer_than_a_document_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.txt"
    path.touch()
    os.truncate(path, 20 * GIB)
    reset_peak()
    before = read_status("VmRSS")
    with pytest.raises(
        InputError,
        match=rf"sparse.txt: is one document and has more than {MAX_DOCUMENT_BYTES} bytes",
    ):
        texts(path)
    assert read_status("VmHWM") - before < 50_000_000


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip_of), (".zst", zstd_of)])
def test_a_line_has_the_limit_of_a_document(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    compress: Callable[[bytes, int], bytes],
) -> None:
    # The limit itself takes a gigabyte; what is tried is that it holds, and that what is below it
    # is read.
    monkeypatch.setattr("inner.data.sources.json_rows.MAX_DOCUMENT_BYTES", 8 << 20)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(b'{"text": "a"}\n' + JSON_START, 9 << 20))
    with pytest.raises(InputError, match=rf"a.jsonl{suffix}: line 2 has more than {8 << 20} bytes"):
        texts(path)
    end = {".gz": gzip.compress, ".zst": zstandard.compress}[suffix](b'"}\n')
    path.write_bytes(compress(JSON_START, 7 << 20) + end)
    assert [len(text) for text in texts(path)] == [7 << 20]


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_of_a_tar_has_a_limit(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("a")
    member.type, member.size = kind, 3 * GIB
    path = tmp_path / "a.tar"
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, 3 * GIB + 2048)
    with pytest.raises(
        InputError, match=rf"(?s)a.tar: cannot be read as tar .*a header has {3 * GIB} bytes"
    ):
        texts(path)


def test_a_tar_whose_members_are_many_takes_no_memory_for_them(tmp_path: Path) -> None:
    header = tarfile.TarInfo("a.jpg").tobuf(tarfile.USTAR_FORMAT)
    many, text = gzip.compress(header * 2000), io.BytesIO()
    with tarfile.open(fileobj=text, mode="w:gz") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"a"))
    path = tmp_path / "a.tar.gz"
    path.write_bytes(many * 10 + text.getvalue())
    reset_peak()
    before = read_status("VmRSS")
    assert texts(path) == ["a"]
    assert read_status("VmHWM") - before < 12_000_000, "20,000 members are 30 MB"


@pytest.mark.parametrize("encoding", ["dictionary", "DELTA_BYTE_ARRAY"])
def test_a_parquet_file_that_repeats_a_long_value_is_read_in_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr("inner.data.sources.files.MAX_DOCUMENT_BYTES", 4 << 20)
    path, value, count = tmp_path / "a.parquet", "a" * (1 << 20), 100
    if encoding == "dictionary":
        column = pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * count), pyarrow.array([value])
        )
        options = {"dictionary_pagesize_limit": GIB}
    else:
        column = pyarrow.array([value] * count, pyarrow.large_string())
        options = {"use_dictionary": False, "column_encoding": {"text": encoding}}
    pyarrow.parquet.write_table(
        pyarrow.table({"text": column}), path, compression="zstd", **options
    )
    del column
    assert path.stat().st_size < 100_000
    reset_peak()
    before = read_status("VmRSS")
    documents = FilesSource((str(path),), TextField("text")).documents()
    assert sum(len(document.text) for document in documents) == count * len(value)
    assert read_status("VmHWM") - before < 60_000_000, "64 rows at once are 134 MB"


def test_a_parquet_file_without_rows_in_a_group_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for rows in ([], ["a", None], []):
            writer.write_table(pyarrow.table({"text": pyarrow.array(rows, pyarrow.string())}))
    assert texts(path) == ["a"]


def test_arrays_with_no_possible_shape_are_refused(tmp_path: Path) -> None:
    for number, shape in enumerate(
        [f"({10**30},)", "(" * 9000, "(-1,)", f"({1 << 62},)", "('a',)"]
    ):
        path = tmp_path / f"{number}.npy"
        header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".encode()
        path.write_bytes(
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(100)
        )
        with pytest.raises(InputError, match=f"{number}.npy"):
            open_token_files([str(path)], "uint16")


@pytest.mark.parametrize("name", ["config.json", "index of safetensors", "tokenizer.json"])
def test_a_file_of_settings_has_a_limit(tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    path = reader.prepare(tmp_path)
    os.truncate(path, 20 * GIB)
    with pytest.raises(InputError, match=rf"{path.name}.*has {20 * GIB} bytes, but at most"):
        reader.read(path)


def test_a_header_of_safetensors_has_a_limit(tmp_path: Path) -> None:
    reader = READERS["header of safetensors"]
    path = reader.prepare(tmp_path)
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 0]}
    path.write_text(json.dumps({f"t{number}": entry for number in range(100_000)}))
    with pytest.raises(InputError, match=r"model.safetensors.*its header has \d+ bytes; at most"):
        reader.read(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 30_000, "nested more than 64 deep"),
        ("- " * 30_000, "nested more than 64 deep"),
        ("a: &a [1]\nb: *a", "anchors are not allowed"),
        ("a: " + "a" * 70_000, "at most 65536"),
        ("a: 0x" + "f" * 5000, "400 digits"),
        ("a: !!timestamp x", "not valid YAML"),
    ],
)
def test_a_swarms_config_that_is_deep_or_long_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_swarm_config(text)


def test_aliases_count_as_what_they_stand_for() -> None:
    laughs = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)
    )
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60)
    )
    for text in (laughs, merges, "a: &a [*a]"):
        with pytest.raises(ConfigError, match="including the values that its aliases repeat"):
            parse_config(text)


def test_an_override_that_is_no_date_is_text() -> None:
    values: dict[str, object] = {}
    apply_override(values, "name=2024-13-45")
    assert values == {"name": "2024-13-45"}
