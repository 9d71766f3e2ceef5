"""Which files an entry of data.paths names: behind links, in loops, and by several entries."""

from pathlib import Path

import numpy as np
import pytest

from inner.data.sources.documents import TextField
from inner.data.sources.files import FilesSource
from inner.data.sources.find import find_files
from inner.data.token_files.open_files import open_token_files
from inner.files import make_cache_folder


def read(*entries: object) -> list[tuple[str, str]]:
    source = FilesSource(tuple(map(str, entries)), TextField("text"))
    return [(document.key, document.text) for document in source.documents()]


def put(path: Path) -> Path:
    """Write a file whose text is its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(path.name)
    return path


def forms(folder: Path) -> list[str]:
    """The ways to name all files of a folder."""
    return [
        str(folder),
        f"{folder}/",
        f"{folder}/**",
        f"{folder}/**/*",
        f"{folder}/../{folder.name}",
    ]


def test_a_folder_behind_a_link_is_read_by_every_form_of_the_path(tmp_path: Path) -> None:
    put(tmp_path / "data" / "real" / "a.txt")
    put(tmp_path / "elsewhere" / "deep" / "b.txt")
    put(tmp_path / "c.txt")
    (tmp_path / "data" / "linked").symlink_to("../elsewhere")
    (tmp_path / "data" / "d.txt").symlink_to("../c.txt")
    for form in forms(tmp_path / "data"):
        assert read(form) == [
            ("d.txt", "c.txt"),
            ("linked/deep/b.txt", "b.txt"),
            ("real/a.txt", "a.txt"),
        ], form


def test_a_link_as_the_entry_gives_the_keys_of_its_folder(tmp_path: Path) -> None:
    put(tmp_path / "data" / "sub" / "a.txt")
    (tmp_path / "link").symlink_to("data")
    for form in [*forms(tmp_path / "data"), *forms(tmp_path / "link")]:
        assert read(form) == [("sub/a.txt", "a.txt")], form


def test_a_file_in_a_loop_of_links_is_read_once_by_its_shortest_path(tmp_path: Path) -> None:
    put(tmp_path / "data" / "sub" / "z.txt")
    put(tmp_path / "data" / "y.txt")
    (tmp_path / "data" / "sub" / "again").symlink_to("..")
    for form in forms(tmp_path / "data"):
        assert read(form) == [("sub/z.txt", "z.txt"), ("y.txt", "y.txt")], form


def test_many_loops_of_links_end(tmp_path: Path) -> None:
    put(tmp_path / "a.txt")
    for number in range(20):
        (tmp_path / f"loop{number}").symlink_to(".")
    assert [key for key, _ in find_files(str(tmp_path))] == ["a.txt"]


def test_a_folder_and_a_link_to_it_are_read_once(tmp_path: Path) -> None:
    put(tmp_path / "data" / "real" / "a.txt")
    (tmp_path / "data" / "another").symlink_to("real")
    for form in forms(tmp_path / "data"):
        assert read(form) == [("another/a.txt", "a.txt")], form


def test_hidden_files_and_broken_links_are_left_out_by_every_form(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.txt")
    put(tmp_path / "data" / ".git" / "b.txt")
    (tmp_path / "data" / "broken").symlink_to("nothing")
    for form in forms(tmp_path / "data"):
        assert read(form) == [("a.txt", "a.txt")], form


def test_the_cache_in_a_folder_of_data_is_left_out(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.txt")
    make_cache_folder(tmp_path / "data" / "cache")
    put(tmp_path / "data" / "cache" / "shard.json")
    for form in forms(tmp_path / "data"):
        assert read(form) == [("a.txt", "a.txt")], form


def test_overlapping_entries_give_each_file_once_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = put(tmp_path / "data" / "sub" / "a.txt")
    put(tmp_path / "data" / "b.txt")
    (tmp_path / "link").symlink_to("data")
    assert read(first, tmp_path / "data", tmp_path / "link") == [
        ("a.txt", "a.txt"),
        ("b.txt", "b.txt"),
    ]
    (message,) = caplog.messages
    assert message.endswith("and 2 more files are named more than once in data.paths and read once")


def test_overlapping_entries_have_one_fingerprint_with_those_that_do_not(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.txt")
    once = FilesSource((f"{tmp_path}/data",), TextField("text"))
    twice = FilesSource((f"{tmp_path}/data", f"{tmp_path}/data/*.txt"), TextField("text"))
    assert once.fingerprint() == twice.fingerprint()


def test_token_files_of_overlapping_entries_are_opened_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", np.arange(9, dtype=np.uint16))
    (tmp_path / "link").symlink_to("data")
    opened = open_token_files(
        [f"{tmp_path}/data", f"{tmp_path}/link", f"{tmp_path}/data/*.npy"], "uint16"
    )
    assert len(opened) == 1
