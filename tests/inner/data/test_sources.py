"""Sources on files written by the tests, and errors of unavailable sources."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from inner.config import DataConfig
from inner.data.corpus import check_source, prepare_corpus
from inner.data.sources.build import build_source
from inner.errors import InputError


def documents(**settings: object) -> dict[str, str]:
    """Texts by key of the documents of a source with these settings."""
    source = build_source(DataConfig.model_validate(settings))
    return {document.key: document.text for document in source.documents()}


def error_of(**settings: object) -> str:
    with pytest.raises(InputError) as caught:
        check_source(DataConfig.model_validate(settings))
    return str(caught.value)


def write_parquet(path: Path, count: int, field: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {field: [f"row {i}" for i in range(count)], "score": list(range(count))}
    pq.write_table(pa.table(columns), path, row_group_size=max(10, count // 40))


def test_a_folder_gives_its_text_files_by_relative_path(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.md").write_text("b")
    (tmp_path / "sub" / "a.py").write_text("a")
    (tmp_path / ".hidden").write_text("h")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    assert documents(source="files", paths=[str(tmp_path)]) == {"b.md": "b", "sub/a.py": "a"}


def test_a_glob_names_matches_relative_to_its_literal_part(tmp_path: Path) -> None:
    for name in ("x/one.txt", "y/one.txt", "y/two.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = documents(source="files", paths=[f"{tmp_path}/*/one.txt"])
    assert found == {"x/one.txt": "x/one.txt", "y/one.txt": "y/one.txt"}


def test_files_that_are_no_text_are_reported_once_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b.md").write_text("b")
    for name in ("a.png", "c.png", "d.png"):
        (tmp_path / name).write_bytes(b"\xff\xd8")
    assert documents(source="files", paths=[str(tmp_path)]) == {"b.md": "b"}
    first = tmp_path / "a.png"
    assert caplog.messages == [f"{first} and 2 more files are not UTF-8 text and skipped"]


def test_jsonl_gives_a_document_per_row_with_text(tmp_path: Path) -> None:
    rows = [{"body": "one"}, {"body": None}, {"body": "three \u00e9\u2028still"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    found = documents(source="files", paths=[str(tmp_path / "a.jsonl")], text_field="body")
    assert found == {"a.jsonl#0": "one", "a.jsonl#4": "three \u00e9\u2028still"}


def test_parquet_gives_a_document_per_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 25)
    found = documents(source="files", paths=[str(tmp_path)])
    assert found == {f"a.parquet#{i}": f"row {i}" for i in range(25)}


def test_a_lone_surrogate_in_a_row_does_no_harm(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"broken \ud800 {i}"}) + "\n" for i in range(50))
    (tmp_path / "a.jsonl").write_text(rows)
    config = DataConfig(source="files", paths=[str(tmp_path)], heldout_fraction=0.3)
    corpus = prepare_corpus(config, tmp_path / "cache")
    assert len(corpus.texts[0].heldout[:]) > corpus.texts[0].heldout_bytes > 0


def test_a_dataset_folder_is_streamed_by_the_datasets_library(tmp_path: Path) -> None:
    write_parquet(tmp_path / "mine" / "train.parquet", 25)
    found = documents(source="huggingface", dataset=str(tmp_path / "mine"), max_tokens=10)
    assert found == {f"mine/train#{i}": f"row {i}" for i in range(25)}


def test_a_dataset_is_read_until_max_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    rows = "".join(json.dumps({"text": f"row {i:04}"}) + "\n" for i in range(1000))
    (folder / "train.jsonl").write_text(rows)
    config = DataConfig(
        source="huggingface", dataset=str(folder), max_tokens=500, heldout_fraction=0.1
    )
    check_source(config)
    corpus = prepare_corpus(config, tmp_path / "cache")
    assert len(corpus.texts[0].train[:]) == 500
    assert 50 <= len(corpus.texts[0].heldout[:]) < 60


def test_a_command_that_stops_within_a_stream_ends_cleanly(tmp_path: Path) -> None:
    write_parquet(tmp_path / "mine" / "train.parquet", 20000)
    settings = [
        "data.source=huggingface",
        f"data.dataset={tmp_path / 'mine'}",
        "data.max_tokens=900",
    ]
    command = [sys.executable, "-m", "diloco", "prepare", "configs/quickstart.yaml", *settings]
    command.append(f"island.cache_dir={tmp_path / 'cache'}")
    subprocess.run(
        command, check=True, timeout=60, cwd=Path(__file__).parents[3], stdout=subprocess.DEVNULL
    )


def test_missing_paths_are_named(tmp_path: Path) -> None:
    text = error_of(source="files", paths=[f"{tmp_path}/nothing.txt"])
    assert "nothing.txt' does not exist (looked in " in text


def test_a_glob_without_a_match_is_named(tmp_path: Path) -> None:
    assert "*.txt' matches no file" in error_of(source="files", paths=[f"{tmp_path}/*.txt"])


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    assert f"{str(tmp_path)!r} matches no file" in error_of(source="files", paths=[str(tmp_path)])


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\xfd")
    assert "no text in any of the 1 files found" in error_of(source="files", paths=[str(tmp_path)])


def test_files_without_paths_say_what_to_name() -> None:
    assert "data.source=files needs data.paths, got none" in error_of(source="files")


def test_a_missing_text_field_names_the_existing_ones(tmp_path: Path) -> None:
    write_parquet(tmp_path / "p" / "a.parquet", 3, "content")
    (tmp_path / "a.jsonl").write_text('{"content": "x", "url": "y"}')
    assert "existing fields are: content, url;" in error_of(
        source="files", paths=[f"{tmp_path}/a.jsonl"]
    )
    assert "existing fields are: content, score;" in error_of(
        source="files", paths=[f"{tmp_path}/p"]
    )
    text = error_of(source="huggingface", dataset=f"{tmp_path}/p", max_tokens=9)
    assert (
        "no field 'text' (data.text_field)" in text
        and "existing fields are: content, score;" in text
    )


def test_a_text_field_without_text_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 3)
    text = error_of(source="files", paths=[str(tmp_path)], text_field="score")
    assert "row 0: field 'score' must be text, got int" in text


@pytest.mark.parametrize(("line", "cause"), [("[1]", "got a JSON list"), ('{"text": ', "not JSON")])
def test_a_broken_row_is_named_by_its_line(tmp_path: Path, line: str, cause: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n" + line)
    text = error_of(source="files", paths=[str(tmp_path)])
    assert f"a.jsonl, line 2: {cause}" in text


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    assert "a.parquet: cannot be read as Parquet" in error_of(source="files", paths=[str(tmp_path)])


def test_a_parquet_file_that_is_cut_off_or_damaged_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "whole.parquet", 200)
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "whole.parquet").unlink()
    for size in (0, 4, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.parquet").write_bytes(whole[:size])
        assert "a.parquet: cannot be read as Parquet" in error_of(
            source="files", paths=[str(tmp_path)]
        )
    (tmp_path / "a.parquet").write_bytes(whole[:4] + b"\xff" * 200 + whole[204:])
    assert "a.parquet: cannot be read as Parquet" in error_of(source="files", paths=[str(tmp_path)])


def test_an_empty_split_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    text = error_of(source="huggingface", dataset=str(tmp_path / "mine"), max_tokens=9)
    assert "dataset mine/train: the split holds no text" in text


def test_an_unknown_split_names_the_existing_ones(tmp_path: Path) -> None:
    write_parquet(tmp_path / "mine" / "train.parquet", 3)
    text = error_of(
        source="huggingface", dataset=str(tmp_path / "mine"), split="test", max_tokens=9
    )
    assert "split 'test'" in text and "['train']" in text


def test_huggingface_needs_a_dataset_and_a_limit() -> None:
    assert "needs data.dataset, got none" in error_of(source="huggingface", max_tokens=9)
    assert "needs data.max_tokens" in error_of(source="huggingface", dataset="allenai/c4")


def test_a_hub_that_cannot_be_reached_is_a_quick_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens on this port, so no name is looked up and nothing leaves the machine.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started_at = time.monotonic()
    text = error_of(source="huggingface", dataset="allenai/c4", max_tokens=9)
    assert time.monotonic() - started_at < 15
    assert "dataset 'allenai/c4' cannot be reached on the Hugging Face hub: " in text
    assert "use data.source=files or data.source=python-stdlib" in text
