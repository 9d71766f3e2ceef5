"""Versions of other people's packages, whose files may be damaged or change at this moment."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from outer.diagnostics import package_versions
from outer.packages import find_version


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What other tests have found, and what this one has."""
    find_version.cache_clear()
    yield
    find_version.cache_clear()


def install(folder: Path, name: str, metadata: str | bytes | None) -> None:
    """Leave what an installation of `name` has written so far."""
    (folder / f"{name}-1.0.dist-info").mkdir()
    if metadata is not None:
        text = metadata.encode() if isinstance(metadata, str) else metadata
        (folder / f"{name}-1.0.dist-info" / "METADATA").write_bytes(text)


def test_a_package_that_is_not_installed_is_left_out_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert find_version("diloco-nowhere") is None and not caplog.messages


@pytest.mark.parametrize(
    "metadata", [None, "", "Name: damaged\n", b"Name: damaged\nVersion: \xff\xfe\n"]
)
def test_damaged_metadata_is_one_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    metadata: str | bytes | None,
) -> None:
    install(tmp_path, "damaged", metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_version("damaged") is None and find_version("damaged") is None
    (said,) = caplog.messages
    assert said.startswith("the version of damaged cannot be read")


def test_an_island_tells_visitors_the_versions_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(tmp_path, "hivemind", None)
    install(tmp_path, "torch", "Name: torch\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = package_versions()
    assert found["torch"] == "9.9" and "hivemind" not in found
