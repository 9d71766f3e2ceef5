"""Files of an island are there whole or not at all."""

from pathlib import Path

import pytest

from outer.identity.files import file_beside, write_atomically


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with pytest.raises(OSError, match="full"), file_beside(path) as beside:
        beside.write_bytes(b"ne")
        raise OSError("the disk is full")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
