"""environment.json: enough to run the same again, and no secret."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.records.environment import (
    changes,
    describe_environment,
    find_packages,
    is_told,
    read_diff,
    read_environment,
)
from diloco.records.environment import write_environment as write


def commit_file(checkout: Path, text: str) -> None:
    (checkout / "a.py").write_text(text)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(checkout), *words], check=True, timeout=60)


def test_code_packages_hardware_and_command_are_written(tmp_path: Path) -> None:
    assert write(tmp_path) == {}
    found = json.loads((tmp_path / "environment.json").read_text())
    assert (
        found["packages"]["torch"]
        and found["cores"] >= 1
        and found["processor"]
        and found["command"] == sys.argv
    )


def test_a_change_of_the_code_or_of_a_package_is_returned_at_the_next_start(tmp_path: Path) -> None:
    write(tmp_path)
    found = json.loads((tmp_path / "environment.json").read_text())
    found["packages"]["torch"], found["commit"] = "1.0", "0" * 40
    (tmp_path / "environment.json").write_text(json.dumps(found))
    changed = write(tmp_path)
    assert set(changed) == {"torch", "commit"} and changed["torch"].startswith("1.0 -> ")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "environment.json").write_text(text)
    assert read_environment(tmp_path) is None


def test_packages_of_another_form_are_none() -> None:
    assert changes({"packages": 3}, {"packages": {"torch": "2"}}) == {"torch": "None -> 2"}


@pytest.mark.skipif(shutil.which("git") is None, reason="a diff needs git")
def test_changes_that_are_not_committed_are_the_diff(tmp_path: Path) -> None:
    commit_file(tmp_path, "x = 1\n")
    (tmp_path / "a.py").write_text("x = 2\n")
    assert "-x = 1\n+x = 2" in read_diff(tmp_path)


def test_a_folder_that_is_no_checkout_has_no_diff(tmp_path: Path) -> None:
    assert read_diff(tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "told"), [("NCCL_DEBUG", True), ("HF_HUB_TOKEN", False), ("WANDB_API_KEY", False)]
)
def test_secrets_are_not_written(name: str, told: bool) -> None:
    assert is_told(name) is told


def test_the_environment_is_described_once_in_a_process() -> None:
    assert describe_environment() is describe_environment()


def test_packages_that_are_half_installed_are_left_out_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name, metadata in (
        ("empty", None),
        ("nameless", b"Version: 1\n"),
        ("garbled", b"\xff\xfe"),
    ):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        if metadata is not None:
            (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_packages()
    assert found["torch"] and not {"empty", "nameless", "garbled"} & found.keys()
    (said,) = caplog.messages
    assert all(name in said for name in ("empty", "nameless", "garbled"))
