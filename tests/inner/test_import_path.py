"""Own code is found by its import path, and each way to get it wrong has its own message."""

import hashlib
from pathlib import Path

import pytest

from inner.errors import InputError
from inner.import_path import is_import_path, load, source_sha256


@pytest.mark.parametrize(
    "name", ["adamw", "a.b", "a:b.c", "a b:c", ":a", "a:", "../a:b", "a..b:c", "1a:b", "a/b:c"]
)
def test_other_names_are_no_import_paths(name: str) -> None:
    assert not is_import_path(name)
    assert is_import_path("my_package.optimizers:Lion") and is_import_path("lion:Lion")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_package.x:Y", "there is no module 'no_such_package' here; install its package"),
        ("tests.own.nothing:Y", r"there is no module 'tests\.own\.nothing'"),
        ("tests.own.optimizers:lion", "the nearest name is tests.own.optimizers:Lion"),
        ("tests.own.optimizers:OWN", "allowed: a class or function that tests defines in"),
    ],
)
def test_a_wrong_path_is_refused(path: str, why: str) -> None:
    with pytest.raises(InputError, match=f"^optimizer.name: got '{path}'; .*{why}"):
        load(path, "optimizer.name")


def test_a_module_that_fails_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match="importing broken_module failed: RuntimeError: no licence"
    ):
        load("broken_module:Thing", "optimizer.name")


def test_what_a_module_has_imported_from_elsewhere_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "borrowing.py").write_text("from os import system\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match="a class or function that borrowing defines in borrowing; it has none"
    ):
        load("borrowing:system", "optimizer.name")


def test_the_hash_is_that_of_the_file() -> None:
    file = Path(__file__).parents[1] / "own" / "optimizers.py"
    assert (
        source_sha256("tests.own.optimizers:Lion", "x")
        == hashlib.sha256(file.read_bytes()).hexdigest()
    )
