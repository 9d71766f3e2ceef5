"""Which form a local file is read in, by its name and content."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from inner.data.sources.documents import TextField
from inner.data.sources.files import FilesSource
from inner.errors import InputError

TEXTS = [f"row {number} \u00e9" for number in range(9)]
ROWS = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
NAMES = (
    "a.jsonl",
    "a.json",
    "a.ndjson",
    "A.JSONL",
    "A.NDJson",
    "a.JSON",
    "c4-train.00000-of-01024.json",
)


def read(*paths: Path, field: str = "text") -> dict[str, str]:
    source = FilesSource(tuple(map(str, paths)), TextField(field))
    return {document.key: document.text for document in source.documents()}


def error_of(*paths: Path) -> str:
    with pytest.raises(InputError) as caught:
        read(*paths)
    return str(caught.value)


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("name", NAMES)
def test_json_lines_by_any_name_are_rows(tmp_path: Path, name: str, compression: str) -> None:
    path = tmp_path / f"{name}{compression}"
    path.write_bytes(COMPRESSORS[compression](LINES))
    assert list(read(path).values()) == TEXTS


@pytest.mark.parametrize("compression", [*COMPRESSORS, ".GZ"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_objects_is_read_by_its_items(
    tmp_path: Path, compression: str, indent: int | None
) -> None:
    path = tmp_path / f"alpaca.json{compression}"
    path.write_bytes(COMPRESSORS[compression.lower()](json.dumps(ROWS, indent=indent).encode()))
    assert read(path) == {f"{path.name}#{number}": text for number, text in enumerate(TEXTS)}


def test_an_array_is_read_on_from_an_item(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))
    source = FilesSource((str(path),), TextField("text"))
    place = list(source.documents())[5].place
    assert place is not None
    assert [document.text for document in source.documents_from(place)] == TEXTS[5:]


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n \n"])
def test_one_object_over_several_lines_is_a_row(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "a.json").write_bytes(start + json.dumps(ROWS[3], indent=1).encode())
    assert list(read(tmp_path / "a.json").values()) == [TEXTS[3]]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ('[{"text": "x"}, "y"]', "a.json, item 2: got a JSON str, need an object"),
        (
            '{"model_type": "llama"}',
            "a.json, line 1: no field 'text' (data.text_field); the existing fields are",
        ),
        ('{\n"name": "x"\n}', "a.json, item 1: no field 'text'"),
        ('[{"text": "x"}', "a.json: not JSON"),
        ("plain text", "a.json: not JSON"),
        ("[" * 100_000, "a.json: not JSON"),
    ],
)
def test_a_json_file_without_rows_is_named(tmp_path: Path, content: str, cause: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert cause in error_of(tmp_path / "a.json")


def test_deep_json_in_a_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": ' + "[" * 100_000)
    assert "a.jsonl, line 2: not JSON" in error_of(tmp_path)


@pytest.mark.parametrize(
    "name", ["a.csv", "A.CSV", "a.tsv", "a.csv.gz", "a.arrow", "a.jsonl.bz2", "a.zip", "a.tar.zst"]
)
def test_data_that_is_not_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / name).write_text("id,text\n1,hello\n")
    text = error_of(tmp_path)
    assert (
        f"{name}: " in text
        and "is not read by data.source=files" in text
        and "pattern such as *.txt" in text
    )


@pytest.mark.parametrize("name", ["README.md", "readme", "LICENSE.txt", "dataset_infos.json"])
def test_what_describes_the_data_beside_it_is_left_out_and_said(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_bytes(LINES)
    (tmp_path / name).write_text("about")
    assert list(read(tmp_path).values()) == TEXTS
    assert caplog.messages == [
        f"{tmp_path / name} is left out because its name says that it describes the data beside "
        "it; "
        "name it in data.paths to read it"
    ]


def test_a_readme_among_texts_or_by_its_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "a.py").write_text("code")
    assert read(tmp_path) == {"README.md": "about", "a.py": "code"}
    (tmp_path / "train.jsonl").write_bytes(LINES)
    assert "about" in read(tmp_path, tmp_path / "README.md").values()


def test_a_data_sets_folder_with_a_readme_is_read_as_conversations(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    }
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "sharegpt.json").write_text(json.dumps([row, row]))
    documents = FilesSource((str(tmp_path),), TextField("messages", is_chat=True)).documents()
    assert [document.key for document in documents] == ["sharegpt.json#0", "sharegpt.json#1"]


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_compressed_text_is_one_document(tmp_path: Path, compression: str) -> None:
    (tmp_path / f"a.txt{compression}").write_bytes(
        COMPRESSORS[compression]("a text \u00e9".encode())
    )
    assert read(tmp_path) == {f"a.txt{compression}": "a text \u00e9"}
