"""Checkpoints cut, flipped or gone are found before they are loaded; which ones are kept."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inner.checkpoint.save_load import Checkpoints
from inner.errors import InputError
from tests.damage import flip, truncate
from tests.harness import run_ranks
from tests.inner.checkpoint_crash import (
    FILES,
    Heard,
    Tiny,
    error_of,
    names_in,
    open_checkpoints,
    save_steps,
    step_and_values,
    with_checkpoints,
)

# Damage done to the newest of three checkpoints, with the text of the warning.


def remove(file: Path) -> None:
    file.unlink()


def make_newer(file: Path) -> None:
    """A manifest of a version to come, whole."""
    text = json.dumps(json.loads(file.read_bytes().partition(b"\n")[2]) | {"format": 3})
    digest = subprocess.run(
        ["sha256sum"], input=text.encode(), capture_output=True, check=True
    ).stdout[:64]
    file.write_bytes(digest + b"\n" + text.encode())


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncate": (truncate, "{file}: damaged: it has {less} bytes, {size} were written"),
    "flip": (flip, "{file}: damaged: its content has changed since it was written"),
    "remove": (remove, "{file}: damaged: it is missing, {size} were written"),
}
MANIFEST_DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncate": (truncate, "{file}: damaged: its content has changed since it was written"),
    "flip": (flip, "{file}: damaged: its content has changed since it was written"),
    "remove": (remove, "{file}: cannot be read: No such file or directory"),
    "make_newer": (
        make_newer,
        "{folder}: written in format 3, but this version reads formats 1 and 2",
    ),
}
CASES = [(file, how, rest) for file in FILES for how, rest in DAMAGES.items()]
CASES += [("manifest.json", how, rest) for how, rest in MANIFEST_DAMAGES.items()]
each_damage = pytest.mark.parametrize("case", [(name, how) for name, how, _ in CASES], ids=":".join)


def saved_on_a_rank(rank: int, folder: Path) -> None:
    save_steps(open_checkpoints(folder, keep=3), 1, 2, 3)


def asked_on_a_rank(rank: int, folders: list[Path]) -> list[dict[str, Any]]:
    """What newest() and at() make of each folder."""
    answers = []
    heard = Heard()
    for folder in folders:
        heard.messages = []
        checkpoints = open_checkpoints(folder)
        answers.append({"found": step_and_values(checkpoints), "warnings": heard.messages})
        with pytest.raises(InputError) as error:
            checkpoints.at(3)
        answers[-1]["at"] = str(error.value)
    return answers


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1, 2 and 3 by two ranks."""
    folder = tmp_path_factory.mktemp("three")
    run_ranks(saved_on_a_rank, 2, folder)
    return folder


@pytest.fixture(scope="module")
def answers(
    three: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], tuple[str, list[dict]]]:
    """The warning expected and what both ranks said, of each damage."""
    folders, expected = [], []
    for number, (name, _, (damage, text)) in enumerate(CASES):
        folder = shutil.copytree(three, tmp_path_factory.mktemp("damaged") / str(number))
        file = folder / "step-00000003" / name
        size = file.stat().st_size
        damage(file)
        folders.append(folder)
        expected.append(text.format(file=file, folder=file.parent, size=size, less=size - 7))
    said = run_ranks(asked_on_a_rank, 2, folders)
    return {
        (name, how): (text, [rank[number] for rank in said])
        for number, ((name, how, _), text) in enumerate(zip(CASES, expected, strict=True))
    }


@each_damage
def test_damaged_newest_is_passed_over_with_a_warning(answers, case: tuple[str, str]) -> None:
    expected, ranks = answers[case]
    assert [rank["found"] for rank in ranks] == [(2, {2.0})] * 2
    assert len(ranks[0]["warnings"]) == 1
    assert expected in ranks[0]["warnings"][0]
    assert ranks[1]["warnings"] == []


@each_damage
def test_damaged_step_is_refused_naming_the_file(answers, case: tuple[str, str]) -> None:
    expected, ranks = answers[case]
    assert all(expected in rank["at"] for rank in ranks)


def test_only_damaged_checkpoints_are_an_error(three: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(three, tmp_path / "damaged")
    for number in (1, 2, 3):
        truncate(folder / f"step-0000000{number}" / "rank-1.tensors")
    for error in run_ranks(with_checkpoints, 2, folder, newest_refused):
        assert "none of the 3 checkpoints is whole" in error
        assert "rank-1.tensors: damaged" in error


def newest_refused(rank: int, checkpoints: Checkpoints, folder: Path) -> str:
    return error_of(checkpoints.newest)


def test_keeps_the_newest_whole_ones(three: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(three, tmp_path / "keep")
    truncate(folder / "step-00000002" / "index.json")
    before, after = run_ranks(with_checkpoints, 2, folder, two_more)[0]
    # Two are kept; the damaged one is not counted and not deleted.
    assert before == ["lock", "step-00000002", "step-00000003", "step-00000004"]
    assert after == ["lock", "step-00000002", "step-00000004", "step-00000005"]


def two_more(rank: int, checkpoints: Checkpoints, folder: Path) -> list[list[str]]:
    names = []
    for step in (4, 5):
        save_steps(checkpoints, step)
        names.append(names_in(folder))
    return names


def test_run_that_went_back_goes_on_from_there(three: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(three, tmp_path / "back")
    loaded, names, newest = run_ranks(with_checkpoints, 2, folder, go_back)[0]
    assert loaded == {1.0}
    assert names == ["lock", "step-00000002-2", "step-00000003"]
    assert newest == 2


def go_back(
    rank: int, checkpoints: Checkpoints, folder: Path
) -> tuple[set[float], list[str], int | None]:
    tiny = Tiny(99)
    checkpoints.load(tiny, checkpoints.at(1))
    loaded = tiny.values
    save_steps(checkpoints, 2)
    return loaded, names_in(folder), step_and_values(checkpoints)[0]


def test_nobody_resumes_from_a_rejected_checkpoint_and_the_next_save_deletes_it(
    three: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(three, tmp_path / "rejected")
    found = run_ranks(with_checkpoints, 2, folder, reject_two)
    names, resumed, warnings, after = found[0]
    assert names == ["step-00000003", "step-00000002"]
    assert (resumed, found[1][1]) == (1, 1)
    assert (
        warnings[0]
        == f"checkpoint passed over: {folder / 'step-00000003'}: rejected: no loss was finite "
        "after it"
    )
    assert after == ["lock", "step-00000001", "step-00000002-2"]


def reject_two(
    rank: int, checkpoints: Checkpoints, folder: Path
) -> tuple[list[str], int | None, list[str], list[str]]:
    heard, names = Heard(), checkpoints.reject_since(2)
    resumed, _ = step_and_values(checkpoints)
    save_steps(checkpoints, 2)
    return names, resumed, heard.messages, names_in(folder)
